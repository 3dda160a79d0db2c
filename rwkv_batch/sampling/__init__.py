"""Drawing the next token."""
