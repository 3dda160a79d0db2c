"""Models whose matrices are in a weight format: packed as they are loaded, or from a file of packed ones."""
