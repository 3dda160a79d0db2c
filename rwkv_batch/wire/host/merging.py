"""Requests divided over several engines, and what these say made one again. Pure."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from rwkv_batch.wire.metrics import Series
from rwkv_batch.wire.placing.placement import Placed
from rwkv_batch.wire.protocol import (
    Accepted,
    CommandReply,
    GenerateRequest,
    RequestInfo,
    SessionInfo,
)
from rwkv_batch.wire.supervision import EngineInfo, Loading, Serving

PART = "\x1f"  # in the names of parts of a paused request, behind its own; clients cannot send it
TIERS = ("L1", "L2", "L3")


def name_of(engine: int) -> str:
    """What an engine of several is called, in metrics, logs and errors."""
    return f"engine-{engine}"


def part_of(request: GenerateRequest, share: Placed) -> GenerateRequest:
    """What one engine gets of a request. Its events carry the numbers that the rows have in the whole."""
    if len(share.rows) == len(request.prompts) * request.n:
        return request
    prompts = [request.prompts[prompt] for prompt in share.prompts]
    if request.rows:
        return replace(request, prompts=prompts, rows=[request.rows[row] for row in share.rows])
    numbers = request.row_numbers
    rows = [numbers[row] for row in share.rows] if numbers else share.rows
    return replace(request, prompts=prompts, n=len(rows) // len(prompts), row_numbers=rows)


def accepted_whole(count: int, parts: Sequence[tuple[Sequence[int], Accepted]]) -> Accepted:
    """Of a request of so many prompts; parts: which of the prompts they have, and what was accepted."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    tokens, cached = [0] * count, [0] * count
    ids, data = list[list[int]]([] for _ in range(count)), list[list[bytes]]([] for _ in range(count))
    for prompts, accepted in parts:
        for at, prompt in enumerate(prompts):
            tokens[prompt] = accepted.prompt_tokens[at]
            if accepted.cached_tokens:
                cached[prompt] = max(cached[prompt], accepted.cached_tokens[at])
            if accepted.prompt_ids:
                ids[prompt] = accepted.prompt_ids[at]
            if accepted.prompt_bytes:
                data[prompt] = accepted.prompt_bytes[at]
    return replace(
        first,
        prompt_tokens=tokens,
        cached_tokens=cached if any(cached) else [],
        prompt_ids=ids if any(ids) else [],
        prompt_bytes=data if any(data) else [],
    )


def resumed_whole(parts: Sequence[GenerateRequest]) -> GenerateRequest:
    """A paused request from its parts."""
    placed = [pair for part in parts for pair in zip(part.rows, part.prompts, strict=True)]
    placed.sort(key=lambda pair: pair[0].number)
    return replace(parts[0], rows=[row for row, _ in placed], prompts=[prompt for _, prompt in placed])


def requests_of_all(replies: Iterable[CommandReply]) -> tuple[list[RequestInfo], list[str]]:
    """Those that wait or run, with their parts added up, and the names of those that are paused."""
    found: dict[str, RequestInfo] = {}
    paused: dict[str, None] = {}
    for reply in replies:
        for info in reply.requests:
            if before := found.get(info.name):
                rows, drawn = before.rows + info.rows, before.drawn + info.drawn
                info = replace(info, rows=rows, drawn=drawn)
            found[info.name] = info
        paused |= dict.fromkeys(name.partition(PART)[0] for name in reply.paused)
    return list(found.values()), list(paused)


def sessions_of_all(replies: Sequence[CommandReply], limit: int | None, in_order: bool) -> CommandReply:
    """Sessions once each, in the fastest tier that has them. in_order: of their keys, at most `limit`."""
    found: dict[str, SessionInfo] = {}
    for reply in replies:
        for info in reply.sessions:
            before = found.get(info.key)
            if before is None or TIERS.index(info.tier) < TIERS.index(before.tier):
                found[info.key] = info
    listed = list(found.values())
    if in_order:
        listed = sorted(listed, key=lambda info: info.key.encode(errors="surrogatepass"))[:limit]
    else:
        listed.sort(key=lambda info: info.tier)  # those of an engine keep their order
    l1, l2 = sum(reply.l1 for reply in replies), sum(reply.l2 for reply in replies)
    total = max([*(reply.total for reply in replies), len(found)])
    return replace(replies[0], sessions=listed, total=total, l1=min(l1, total), l2=min(l2, total - l1))


def metrics_of_all(replies: Iterable[tuple[int, CommandReply]]) -> list[Series]:
    """Each series with its engine as the last label."""
    return [
        Series(series.family, [*series.labels, name_of(engine)], series.values)
        for engine, reply in replies
        for series in reply.metrics
    ]


def serving_of_all(servings: Iterable[Serving]) -> Serving:
    """The models that any engine has, with the slots of all, and those that are loaded."""
    models: dict[str, EngineInfo] = {}
    loading: dict[str, Loading] = {}
    for serving in servings:
        for info in serving.models:
            if before := models.get(info.model):
                devices = dict.fromkeys([*before.device.split(", "), info.device])
                slots, device = before.slots + info.slots, ", ".join(devices)
                info = replace(before, slots=slots, device=device)
            models[info.model] = info
        for each in serving.loading:
            behind = loading.get(each.model)
            loading[each.model] = min(behind, each, key=_progress) if behind else each
    return Serving(list(models.values()), list(loading.values()))


def _progress(loading: Loading) -> float:
    return loading.progress
