"""Training of the bundled model, its words and its evaluation."""
