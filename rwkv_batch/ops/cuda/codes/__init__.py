"""Matrices of codes on any GPU."""
