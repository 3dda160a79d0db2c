"""What only some models and GPUs need."""
