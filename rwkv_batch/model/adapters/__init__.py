"""Adapters: what a file changes in a model, read, checked and merged."""
