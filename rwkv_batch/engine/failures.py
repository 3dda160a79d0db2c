"""What becomes of requests when a step fails."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rwkv_batch.engine.scheduling.sequence import Outbox, RequestKey, Sequence
from rwkv_batch.engine.scheduling.turns import Turns
from rwkv_batch.wire.protocol import Failed

log = logging.getLogger(__name__)


@contextmanager
def failing(
    turns: Turns, cancel: Callable[[RequestKey, str], None], outbox: Outbox, sequences: Iterable[Sequence]
) -> Iterator[None]:
    """An error inside fails the requests of these sequences, and nothing else."""
    try:
        yield
    except Exception as error:
        log.exception("a step failed")
        ended = [seq for seq in sequences if turns.ended(seq)]
        for seq in ended:
            turns.abandon(seq)
        for key in {seq.key for seq in sequences if seq not in ended}:
            cancel(key, "error")
            message = f"The engine could not run this request ({type(error).__name__})."
            outbox.append((key, Failed(key[1], message)))
