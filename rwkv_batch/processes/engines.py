"""One of the engines, over all processes that it has had."""

from collections.abc import Callable, Sequence
from functools import partial

from rwkv_batch.config import EngineConfig
from rwkv_batch.processes.child import Child
from rwkv_batch.processes.pulse import Pulse
from rwkv_batch.processes.supervised import Supervised
from rwkv_batch.wire.supervision import Serving


class EngineProcess(Supervised):
    """What the supervisor knows of an engine, and its process."""

    started = False

    def __init__(
        self,
        number: int,
        name: str,
        target: Callable[..., None],
        configs: tuple[EngineConfig, ...],
        address: str,
        pulse: Pulse,
    ) -> None:
        """`name`: of its processes. `target`: what they run. `address`: where it listens."""
        super().__init__()
        self.number, self.name, self.address = number, name, address
        self._child = partial(Child, name, target, configs, address)
        self.serving: Serving | None = None  # what front ends know that it serves; None: nothing
        self.held: Serving | None = None  # what it would serve, until a change of the others is over
        self.missing: list[bytes] = []  # changes that the others have made since its process was started
        self.deaf = False  # its process is ending, or should have ended
        self.killed = False  # its process has been, as it hung or loaded, and may take long to end
        self.absent = False  # there can be no process now, which is tried again
        self.pulse = pulse

    def start(self, changes: Sequence[bytes]) -> None:
        """Start a process, which makes these changes first. Raises CannotStart."""
        self.serving, self.held, self.missing, self.deaf, self.killed = None, None, [], False, False
        self.pulse.rest()
        self.absent = True
        self.child = self._child(changes)
        self.started, self.absent = True, False
