"""What a state pool is made of."""

from dataclasses import dataclass

from rwkv_batch.state.jobs import PoolThreads
from rwkv_batch.state.log.adapted import AdaptedModels
from rwkv_batch.state.log.documents import Documents
from rwkv_batch.state.log.protocol import CommitQueue, SessionStore
from rwkv_batch.state.log.refreshing import Refresher
from rwkv_batch.state.log.sessions import Sessions
from rwkv_batch.state.pool.image_cache import ImageCache
from rwkv_batch.state.pool.resume import Resumer
from rwkv_batch.state.pool.tiers import Tiers
from rwkv_batch.state.pool.token_log import TokenLog
from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import Transfer


@dataclass(frozen=True)
class PoolParts:
    """What a pool is made of while it has one database."""

    states: States
    transfer: Transfer
    threads: PoolThreads
    store: SessionStore
    writer: CommitQueue
    adapted: AdaptedModels
    sessions: Sessions
    log: TokenLog
    images: ImageCache
    tiers: Tiers
    resumer: Resumer
    refresher: Refresher | None  # where the store is `remote`
    documents: Documents
