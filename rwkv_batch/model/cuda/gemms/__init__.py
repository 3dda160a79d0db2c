"""Ways to run each GEMM of a layer, and the choice among them by measurement."""
