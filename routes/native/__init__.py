"""The native routes: raw prompts in batches, fill-in-the-middle, translation, sessions."""
