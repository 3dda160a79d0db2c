"""Named states in which sequences begin."""
