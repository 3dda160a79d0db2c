"""The parts of the state pool."""
