"""Checkpoints packed for the CUDA kernels, by family."""
