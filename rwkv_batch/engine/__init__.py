"""Continuous batching over one model. `from rwkv_batch.engine import Engine` is the offline API."""

from typing import Any


def __getattr__(name: str) -> Any:
    # On demand: the scheduler and sequences can be used without torch.
    if name == "Engine":
        from rwkv_batch.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
