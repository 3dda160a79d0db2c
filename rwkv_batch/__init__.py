"""RWKV-7 inference: checkpoints, the model, the batching engine and its wire protocol."""
