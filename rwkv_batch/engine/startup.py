"""What an engine begins with: the weights, the database, and how it describes itself."""

from collections.abc import Callable
from pathlib import Path

from demo import unpack
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import memory
from rwkv_batch.model import checkpoint
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops import device as devices
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.supervision import EngineInfo


def load_weights(
    model: str | Path | Checkpoint | None, progress: Callable[[int, int], None] | None
) -> Checkpoint:
    """A checkpoint, that of a file, or the bundled one. Raises CheckpointError."""
    if isinstance(model, Checkpoint):
        return model
    return (
        checkpoint.load(model, progress) if model else checkpoint.from_tensors("rwkv7-demo", unpack.tensors())
    )


def open_store(config: EngineConfig) -> Store | None:
    """The configured database, with a limit to its size. Raises StoreError."""
    if not config.state_db:
        return None
    store = Store(config.state_db, config.l3_bytes)
    if store.limit is None:
        store.limit = memory.database_limit(Path(config.state_db), store.size())
    return store


def describe(weights: Checkpoint, runner: Runner, rows: int) -> EngineInfo:
    """The description of the engine that front ends get."""
    return EngineInfo(
        model=weights.name,
        layers=weights.layers,
        width=weights.width,
        parameters=weights.parameters,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=devices.describe(runner.device),
        slots=rows,
        vocabulary=weights.vocab,
    )
