"""Matrices in fewer bits: formats, each with packing, its reference in torch and its product on a CPU."""
