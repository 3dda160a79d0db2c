"""Several deltas of a row as one."""

from collections.abc import Sequence

from rwkv_batch.wire.protocol import RowDelta, TokenLogprob

ID, LOGPROB = 8, 100  # bytes that one takes in a list, about


def merge(deltas: list[RowDelta]) -> list[RowDelta]:
    """One delta per row, which holds all of the row's deltas; rows in the order of their first delta."""
    rows: dict[int, list[RowDelta]] = {}
    for delta in deltas:
        if (its := rows.get(delta.row)) is None:
            rows[delta.row] = [delta]
        else:
            its.append(delta)
    return [_joined(its) for its in rows.values()]


def size(deltas: Sequence[RowDelta]) -> int:
    """About how many bytes of memory they take."""
    return sum(
        len(delta.text) + ID * len(delta.ids) + LOGPROB * (_values(delta.logprobs) + _values(delta.prompt))
        for delta in deltas
    )


def _values(logprobs: list[TokenLogprob]) -> int:
    return sum([1 + len(each.top) for each in logprobs])


def _joined(deltas: list[RowDelta]) -> RowDelta:
    """One that holds all of them, which are of one row."""
    if len(deltas) == 1:
        return deltas[0]
    last, texts, tokens, more = deltas[-1], list[str](), 0, False
    for delta in deltas:  # once: in a stream there is one for each token
        texts.append(delta.text)
        tokens += delta.tokens
        if delta.logprobs or delta.ids or delta.prompt or delta.accepted or delta.rejected:
            more = True
    text = "".join(texts)
    if not more:
        return RowDelta(last.row, text, tokens, last.finish_reason, stop=last.stop, error=last.error)
    return RowDelta(
        last.row,
        text,
        tokens,
        last.finish_reason,
        [each for delta in deltas for each in delta.logprobs],
        last.stop,
        [each for delta in deltas for each in delta.ids],
        [each for delta in deltas for each in delta.prompt],
        last.error,
        sum([delta.accepted for delta in deltas]),
        sum([delta.rejected for delta in deltas]),
    )
