"""What an engine begins with beside its model: the database, the state pool, and how it describes itself."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rwkv_batch import packages
from rwkv_batch.config import IN_MEMORY, EngineConfig, is_url
from rwkv_batch.engine import memory
from rwkv_batch.engine.memory import WHOLE, MemoryShare
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.ops import device as devices
from rwkv_batch.runner.loading import LoadedModel
from rwkv_batch.state.elsewhere.fetching import Sources
from rwkv_batch.state.elsewhere.peers import Peers
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.host.store import HostStore
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.pool.options import PoolOptions, PoolSlots
from rwkv_batch.text.tokenizer import tokenizer_of
from rwkv_batch.wire.supervision import EngineInfo
from state_pool import StatePool

# Where the process listens that writes to a database of this path for all engines; it is started if need be.
SharedDatabase = Callable[[str], str]

log = logging.getLogger(__name__)


def open_store(
    config: EngineConfig, share: MemoryShare = WHOLE, shared: SharedDatabase | None = None
) -> SessionStore | None:
    """The configured database, with a limit to its size. `shared`: see there. Raises StoreError."""
    if not config.state_db or config.state_db == IN_MEMORY:
        return None
    share = replace(share, host=share.host // config.replicas)  # the others have the same database
    limit = config.l3_bytes and config.l3_bytes // share.host
    store: SessionStore
    if is_url(config.state_db):
        store = _open_url(config, limit)
    elif shared:
        store = HostStore(config.state_db, shared(config.state_db), limit)
    else:
        store = Store(config.state_db, limit)
    if store.limit is None and store.images_folder:
        store.limit = memory.database_limit(store.images_folder, store.size(), share)
    return store


def _open_url(config: EngineConfig, limit: int | None) -> SessionStore:
    """The database that other servers may share. Raises StoreError."""
    try:
        packages.load("--state-db with a URL needs", packages.CLUSTER, "psycopg")
    except packages.PackageError as error:
        raise StoreError(f"{error}.") from None
    from rwkv_batch.state.postgres.database.schema import schema_of
    from rwkv_batch.state.postgres.store import PostgresStore

    assert config.state_db
    shares = config.image_store is not None and "://" in config.image_store
    peers = None
    if config.cluster_secret and config.cluster_address:
        peers = Peers(config.cluster_address, config.cluster_secret, config.state_model)
    return PostgresStore(
        config.state_db,
        Path("." if shares else config.image_store or "."),
        limit=limit,
        name=schema_of(config.state_model),
        patience=config.db_patience,
        sources=Sources(config.image_store if shares else None, peers),
    )


def state_pool(
    loaded: LoadedModel,
    config: EngineConfig,
    share: MemoryShare,
    l1: int,
    store: SessionStore | None,
    scheduler: Scheduler,
    wake: Callable[[], None],
) -> StatePool:
    """The model's state pool, which has the scheduler's spare slots. See StatePool."""
    states = loaded.runner.states
    l2 = memory.host_states(states, share) if config.l2 is None else config.l2
    log.info("states of sessions: %d on the device, %d in host memory", l1, l2)
    return StatePool(
        states,
        (loaded.weights.fingerprint, loaded.weights.vocab),
        slots=PoolSlots(l1, l2, scheduler.free, scheduler.spare),
        options=PoolOptions(
            durable=config.durable,
            token_log=config.token_log,
            replay_tokens=config.replay_tokens,
            replay_rate=memory.prefill_rate(loaded.runner, scheduler.prefill_tokens),
            replay_on_new_model=config.replay_on_new_model,
        ),
        store=store,
        wake=wake,
    )


def describe(loaded: LoadedModel, scheduler: Scheduler, rate: float) -> EngineInfo:
    """The description of the engine that front ends get. rate: tokens a second that the model is fed."""
    weights, runner = loaded.weights, loaded.runner
    return EngineInfo(
        model=loaded.name,
        layers=weights.layers,
        width=weights.width,
        parameters=weights.parameters,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=devices.describe(runner.device),
        slots=scheduler.max_rows,
        vocabulary=weights.vocab,
        fingerprint=weights.fingerprint,
        checkpoint=weights.name,
        weights=weights.weights,
        weight_bytes=loaded.device_bytes,
        texts=tokenizer_of(weights.vocab).has_texts,
        step_seconds=(scheduler.prefill_tokens + scheduler.max_rows) / rate,
    )
