"""Products with matrices of codes in blocks."""
