"""What kernels share: launching, the tuning table, tolerance, precision, and the kernels that no room owns."""
