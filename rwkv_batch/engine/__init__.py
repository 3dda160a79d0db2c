"""Continuous batching over one model. `from rwkv_batch.engine import Engine` is the offline API."""

from rwkv_batch.engine.engine import Engine

__all__ = ["Engine"]
