"""Products with matrices of codes."""
