"""RWKV-7: checkpoints, weights and the forward pass."""
