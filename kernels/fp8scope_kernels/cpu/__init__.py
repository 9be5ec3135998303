"""The backend for CPUs: C++ kernels, built with the package and called through ctypes."""
