"""The engine's process, and the models in it."""
