"""Sampling: drawing the next token of each row from its logits."""
