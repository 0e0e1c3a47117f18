"""Benchmarks: freight and its rivals measured in turn, kept as records, shown as tables and plots.

links, disk, gather, hot
                 freight's benchmarks; each registers a function that declares cells
_run, _measure   what such a function is given, and how a cell is checked and measured
_record          what was measured, as dataclasses and as JSON
report           tables, plots and one page, made from records
"""
