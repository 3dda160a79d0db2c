"""The reply to a command."""

from rwkv_batch.engine.rows.rows import Rows, failure
from rwkv_batch.engine.scheduling.row import RequestKey
from rwkv_batch.wire.protocol import CommandReply


def reply(rows: Rows, command: RequestKey, error: str | None, **fields: object) -> None:
    """Answer with a CommandReply of these fields, or with the error, one sentence."""
    answer = CommandReply(command[1], **fields)  # type: ignore[arg-type]
    rows.emit(command, failure(command[1], error) if error else answer)
