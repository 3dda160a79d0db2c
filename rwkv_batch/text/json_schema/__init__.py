"""JSON schemas, as llguidance enforces them."""
