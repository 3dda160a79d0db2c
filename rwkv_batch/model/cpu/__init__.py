"""Models on a CPU, over compiled kernels."""
