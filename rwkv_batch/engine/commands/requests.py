"""Request commands: list the requests that run, stop one, pause one.

A paused request is a document: the request as it was, with what each of its rows has drawn. It is resumed by
sending it to the engine again. As a state is a function of the tokens before it, and a draw of its number and
those before it, what comes then is what would have come, up to near-ties of logits that are computed in
another order. (FlashInfer's draws are its own: rows that it drew go on with other random numbers.)
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import attrgetter, is_

from msgspec.structs import replace

from rwkv_batch.engine.rows.beginnings import mixed
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal
from rwkv_batch.engine.scheduling.row import DECODING, PAUSING, Row
from rwkv_batch.state.entries import Unavailable
from rwkv_batch.wire.codec import encode
from rwkv_batch.wire.commands import PAUSED, ListRequests, PauseRequest, RequestCommand, StopRequest
from rwkv_batch.wire.protocol import (
    GenerateRequest,
    PausedRow,
    Progress,
    RequestInfo,
    RequestKey,
    RowDelta,
)

GOES_ON = "The request is not paused and goes on."


class RequestCommands:
    """Carries commands out; their replies are events. `unqueued`: requests that have no rows yet."""

    def __init__(self, parts: EngineParts, unqueued: Callable[[], list[GenerateRequest]]) -> None:
        self._unqueued = unqueued
        self._pool, self._scheduler, self._rows = parts.pool, parts.scheduler, parts.rows
        self._model = parts.weights.fingerprint
        # Commands, with the rows that lead, and the keys of the documents.
        self._pausing: list[tuple[RequestKey, list[Row], str]] = []
        self._storing: set[RequestKey] = set()  # requests whose rows wait for the database

    def check(self, request: GenerateRequest) -> None:
        """Raises ValueError if the request was paused under another model."""
        if request.model not in ("", self._model):
            raise ValueError(
                f"The request was paused under another model ({request.model}, and this one is "
                f"{self._model}); resume it with the model that began it."
            )

    def run(self, command_key: RequestKey, command: RequestCommand) -> None:
        match command:
            case ListRequests():
                self._list(command_key)
            case StopRequest(name=name):
                if rows := self._find(name):
                    self._rows.reply(command_key, None, requests=_infos(rows))
                    self._stop(rows)
                else:
                    self._pool.documents.remove(
                        PAUSED + name,
                        lambda found, error: self._rows.reply(command_key, error, found=found),
                    )
            case PauseRequest(name=name, part=part):
                rows = [row for row in self._find(name) if not row.held & PAUSING]
                self._pause(command_key, rows, PAUSED + name + part)

    def _list(self, command_key: RequestKey) -> None:
        def listed(keys: list[str], error: str | None) -> None:
            paused = [key.removeprefix(PAUSED) for key in keys]
            found = _infos(self._generating()) + [_info(request) for request in self._unqueued()]
            self._rows.reply(command_key, error, requests=found, paused=paused)

        self._pool.documents.keys(PAUSED, listed)

    def _generating(self) -> list[Row]:
        """All rows whose text has not ended, the rows of a request together, in their order."""
        found = [
            row
            for row in self._scheduler.rows()
            if not row.text.finish_reason and not row.life.abandoned and row.key not in self._storing
        ]
        return sorted(found, key=lambda row: row.arrival)

    def _find(self, name: str) -> list[Row]:
        """The rows of the newest request of that name which still generate."""
        rows = [row for row in self._generating() if row.request.name == name]
        return [row for row in rows if row.key == rows[-1].key]

    def _stop(self, rows: list[Row]) -> None:
        """End their texts here. A turn whose prompt is not read yet leaves its session as it was."""
        for row in rows:
            if row.state is DECODING:
                row.finish("stop")
                row.life.text_ended(row, row.text.take(row.drawn))
            elif row.input.kept is not None:  # it has begun, and waits for a slot again
                row.finish("stop")
                self._rows.show(row, row.text.take(row.drawn))
                self._rows.drop(partial(is_, row))
            else:
                row.text.finish_reason = "paused" if row.drawn else "stop"  # which can be resumed again
                self._rows.show(row, RowDelta(row.number, "", 0, row.text.finish_reason))
                self._rows.drop(partial(is_, row))

    def _pause(self, command_key: RequestKey, rows: list[Row], document: str) -> None:
        """Store the request as it is, and end what its reader gets. Where it is not stored, it goes on."""
        rows = [row for row in rows if row.leads]
        if not rows:
            self._rows.reply(command_key, None)
            return
        if why := self._unpausable(rows[0].request):
            raise Refusal("conflict", f"The request {rows[0].request.name} cannot be paused: {why}.")
        _hold(rows, True)
        self._pausing.append((command_key, rows, document))
        self.poll()

    def poll(self) -> None:
        """Store the requests whose rows are held, as soon as all that is in flight for them is known."""
        for pausing in [*self._pausing]:
            command_key, rows, document = pausing
            if not any(member.in_flight for row in rows for member in row.together):
                self._pausing.remove(pausing)
                self._store(command_key, [row for row in self._generating() if row in rows], document)

    def _store(self, command_key: RequestKey, rows: list[Row], document: str) -> None:
        if not rows:  # they have ended meanwhile
            self._rows.reply(command_key, None)
            return
        key = rows[0].key
        info = _infos(rows)
        self._storing.add(key)

        def stored(error: str | None) -> None:
            self._storing.discard(key)
            if error:
                _hold(rows, False)
                kind = Unavailable if isinstance(error, Unavailable) else str
                self._rows.reply(command_key, kind(f"{error} {GOES_ON}"))
                return
            live = set(self._scheduler.rows())
            left = [row for row in rows if row in live]
            for row in left:
                row.text.finish_reason = "paused"
            self._rows.drop(lambda row: row.key == key)
            if left:
                self._rows.emit(key, Progress(key[1], [row.text.take(row.drawn) for row in left]))
            self._rows.reply(command_key, None, requests=info)

        self._pool.documents.put(document, encode(self._document(rows)), stored)

    def _document(self, rows: list[Row]) -> GenerateRequest:
        """The request, from where its rows are."""
        life = rows[0].life
        request = life.paused(rows[0])
        return replace(
            request,
            adapter_digest=life.adapter.digest if request.adapter and life.adapter else "",
            start_digest=self._pool.starts.digest([part.start_state for part in mixed(request)]),
            prompts=[_prompt_of(request, row.number) for row in rows],
            n=1,
            sampling=replace(request.sampling, seed=rows[0].draws.seed),
            rows=[PausedRow(row.number, row.drawn) for row in rows],
            row_numbers=[],
            model=self._model,
            prefix_cache=False,  # others hardly share what has been drawn
        )

    def _unpausable(self, request: GenerateRequest) -> str | None:
        """Why it cannot be paused, if so."""
        if not request.pausable:
            return "nothing could continue its reply"
        if not self._pool.documents.texts:
            return "its prompt would be stored, and the server stores no texts (--no-token-log)"
        return None


def _prompt_of(request: GenerateRequest, number: int) -> str | list[int]:
    """The prompt of a row as it is in the request."""
    if request.rows:
        return next(p for p, row in zip(request.prompts, request.rows, strict=True) if row.number == number)
    place = request.row_numbers.index(number) if request.row_numbers else number
    return request.prompts[place // request.n]


def _hold(rows: list[Row], held: bool) -> None:
    for row in rows:
        for member in row.together:
            member.held = member.held | PAUSING if held else member.held & ~PAUSING


def _info(request: GenerateRequest) -> RequestInfo:
    """Of a request without rows."""
    rows, drawn = len(request.prompts) * request.n, sum(len(row.drawn) for row in request.rows)
    return RequestInfo(request.name, rows, drawn, request.max_tokens)


def _infos(rows: list[Row]) -> list[RequestInfo]:
    """Of their requests."""
    leading = filter(attrgetter("leads"), rows)
    requests = [list(group) for _, group in groupby(leading, lambda row: row.key)]
    return [
        RequestInfo(
            group[0].request.name,
            len(group),
            sum(len(row.drawn) for row in group),
            group[0].request.max_tokens,
        )
        for group in requests
    ]
