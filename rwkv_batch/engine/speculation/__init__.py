"""Speculative decoding: drafts of what rows may draw, which the model verifies several tokens at a time."""
