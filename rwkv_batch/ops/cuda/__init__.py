"""The CUDA kernels as Python functions."""
