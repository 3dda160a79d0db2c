"""Translating: the language of a text, what in it stays as it is, and what a model's answers become."""
