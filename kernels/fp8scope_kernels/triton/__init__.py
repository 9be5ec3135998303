"""The backend for CUDA devices: kernels in Triton. Nothing here is needed where Triton is not installed."""
