"""The kernels on AMD GPUs."""
