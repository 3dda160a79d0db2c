"""The names and shapes of all weights of a model, by family."""
