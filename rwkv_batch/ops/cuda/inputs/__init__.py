"""Inputs of a step on their way to a GPU."""
