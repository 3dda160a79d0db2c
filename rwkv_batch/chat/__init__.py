"""Conversations as the text that a checkpoint was trained on."""
