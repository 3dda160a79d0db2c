"""What an engine begins with: the weights, the database, and how it describes itself."""

from collections.abc import Callable
from pathlib import Path

from demo import unpack
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import memory
from rwkv_batch.model import checkpoint
from rwkv_batch.model.adapters import reader as adapters
from rwkv_batch.model.adapters.merge import merge
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops import device as devices
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.supervision import EngineInfo


def load_weights(
    model: str | Path | Checkpoint | None,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None,
) -> Checkpoint:
    """A checkpoint, that of a file, or the bundled one, with the adapter merged. Raises CheckpointError."""
    model = model or config.model_path
    if isinstance(model, Checkpoint):
        return _with_adapter(model, config)
    weights = (
        checkpoint.load(model, progress) if model else checkpoint.from_tensors("rwkv7-demo", unpack.tensors())
    )
    return _with_adapter(weights, config)


def _with_adapter(weights: Checkpoint, config: EngineConfig) -> Checkpoint:
    alpha, factor = config.adapter_alpha, config.adapter_scaling
    if config.adapter is None:
        options = {
            "--adapter-alpha": alpha,
            "--adapter-scaling": factor,
            "--adapter-init": config.adapter_init,
            "--mole-router": config.mole_router,
        }
        for flag in (flag for flag, value in options.items() if value is not None):
            raise CheckpointError(f"{flag} needs an adapter; give its file with --adapter.")
        return weights
    if alpha is not None and factor is not None:
        raise CheckpointError("--adapter-alpha and --adapter-scaling say the same; give one of them.")
    adapter = adapters.read(config.adapter, weights, config.adapter_init)
    given = alpha is not None or factor is not None
    return merge(weights, adapter, Scaling(factor, alpha) if given else None, config.mole_router)


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
        fingerprint=weights.fingerprint,
    )
