"""What the engine does for front ends beside generating: with stored sessions, and with running requests."""
