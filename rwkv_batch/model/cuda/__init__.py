"""The forward pass over the CUDA kernels: packed weights, GEMMs and how each runs, graphs."""
