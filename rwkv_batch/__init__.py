"""RWKV-7 inference: checkpoints, the model, the batching engine and its wire protocol."""

__version__ = "0.7.0"
