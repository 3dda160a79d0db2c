"""Named states in which rows begin."""
