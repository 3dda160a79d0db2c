"""The operations of the model: readable references in torch, and kernels behind the same functions."""
