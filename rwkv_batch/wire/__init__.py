"""Messages between front ends and the engine."""
