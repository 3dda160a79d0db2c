"""Changes of models and adapters where there are several engines: one at a time, made by all of them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rwkv_batch.processes.child import Child
from rwkv_batch.wire.codec import ToEngine, decode_to_engine
from rwkv_batch.wire.commands import LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
from rwkv_batch.wire.supervision import ChangeGranted, Serving


class ChangeTurn(NamedTuple):
    """A change that is made now. `had`: the models that there were before."""

    frontend: Child | None  # None: it has died, and another one is to finish it
    command: bytes
    had: list[str]


class ChangeQueue:
    """The changes since the server began, and which front end may make the next one.

    No engine begins to serve while one is made, so that all that serve make it. Where a front end dies in its
    turn, engines may differ: another one sees that all have made the change, or none, before the next.
    """

    def __init__(self, frontends: Sequence[Child], serving: Callable[[], Iterable[Serving]]) -> None:
        """`frontends`: those that live, whenever that is looked at. `serving`: what engines serve now."""
        self.made: list[bytes] = []  # what an engine has to make that is started now
        self._frontends, self._serving = frontends, serving
        self._changing: ChangeTurn | None = None
        self._waiting: deque[tuple[Child, bytes]] = deque()

    @property
    def under_way(self) -> bool:
        return self._changing is not None

    def wanted(self, frontend: Child, command: bytes) -> None:
        """A front end waits until it may make this one."""
        self._waiting.append((frontend, command))
        self.grant()

    def over(self, frontend: Child, made: bool) -> bytes | None:
        """It has made its change, or nothing has changed. `grant` follows.

        Returns what was made, which engines that are being started have to make too.
        """
        if self._changing is None or self._changing.frontend is not frontend:
            return None
        command, self._changing = self._changing.command, None
        if not made:
            return None
        self.made = compacted(self.made, command)
        return command

    def lost(self, frontend: Child) -> None:
        """It has died. Another one finishes its change, at once or once it has started (`grant`)."""
        self._waiting = deque(each for each in self._waiting if each[0] is not frontend)
        if (turn := self._changing) and turn.frontend is frontend:
            self._changing = None if is_taken(self.made, turn.command) else turn._replace(frontend=None)
        self.grant()

    def grant(self) -> None:
        """Let the one begin that has waited longest, if none is made now."""
        if self._changing is None and self._waiting:
            frontend, command = self._waiting.popleft()
            had = [info.model for serving in self._serving() for info in serving.models]
            self._changing = ChangeTurn(frontend, command, sorted({*had}))
            frontend.send(ChangeGranted())
        elif self._changing and self._changing.frontend is None and self._frontends:
            self._changing = self._changing._replace(frontend=self._frontends[0])
            self._frontends[0].send(ChangeGranted(self._changing.command, self._changing.had))


def compacted(changes: list[bytes], change: bytes) -> list[bytes]:
    """The changes of models and adapters, with one more, without those that it makes void.

    Made one after the other they lead to the same models, in the same order, with the same adapters. Models
    are removed last, as the only one cannot be. One that was removed and comes back is the last in order.
    """
    made = [(each, decode_to_engine(each)) for each in changes]
    message = decode_to_engine(change)
    removals = 0
    while removals < len(made) and isinstance(made[-1 - removals][1], RemoveModel):
        removals += 1
    front, behind = made[: len(made) - removals], made[len(made) - removals :]
    match message:
        case LoadModel(name=name):
            front = [each for each in front if not _is_adapter(each[1], name)]
            loaded = [at for at, (_, other) in enumerate(front) if _is_load(other, name)]
            if loaded:
                front[loaded[0]] = change, message
            else:
                front += [each for each in behind if _is_removal(each[1], name)]
                front.append((change, message))
                behind = [each for each in behind if not _is_removal(each[1], name)]
        case RemoveModel(name=name):
            front = [each for each in front if not _is_about(each[1], name)]
            behind = [*(each for each in behind if not _is_removal(each[1], name)), (change, message)]
        case LoadAdapter(to_model=model, key=key):
            front = [each for each in front if not _is_adapter(each[1], model, key)] + [(change, message)]
        case RemoveAdapter(to_model=model, key=key):
            front = [each for each in front if not _is_adapter(each[1], model, key)]
        case _:
            front.append((change, message))
    return [encoded for encoded, _ in front + behind]


def is_taken(changes: list[bytes], change: bytes) -> bool:
    """Whether this would load an adapter whose name these have given already, which engines refuse."""
    message = decode_to_engine(change)
    if not isinstance(message, LoadAdapter):
        return False
    return any(_is_adapter(decode_to_engine(each), message.to_model, message.key) for each in changes)


def _is_load(message: ToEngine, name: str) -> bool:
    return isinstance(message, LoadModel) and message.name == name


def _is_adapter(message: ToEngine, model: str, key: str | None = None) -> bool:
    """key: None: any."""
    return isinstance(message, LoadAdapter) and message.to_model == model and key in (None, message.key)


def _is_removal(message: ToEngine, name: str) -> bool:
    return isinstance(message, RemoveModel) and message.name == name


def _is_about(message: ToEngine, model: str) -> bool:
    return _is_removal(message, model) or _is_load(message, model) or _is_adapter(message, model)
