"""Showing records: tables and plots for README and docs, and one HTML page of everything."""
