"""Kernels for CPUs, compiled by the system's compiler when the first model is loaded."""
