"""ZeroMQ and pipes between tasks of a World: messages take a while, and get lost with those who die."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import zmq
from turn_taking import World

DELAY = 0.001  # seconds that a message takes, on the average
OPTIONS = (
    "DEALER",
    "ROUTER",
    "SNDHWM",
    "RCVHWM",
    "LINGER",
    "RECONNECT_IVL",
    "IMMEDIATE",
    "ROUTER_HANDOVER",
    "EVENT_ACCEPTED",
    "EVENT_DISCONNECTED",
)


class Readable(Protocol):
    """What can be waited for."""

    @property
    def readable(self) -> bool:
        """Whether something has arrived."""


class Network:
    """What the modules `zmq` and `socket` of a process are, as far as those of the state pool use them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._routers: dict[str, Socket] = {}
        self._pipes: dict[int, Pipe] = {}
        self.zmq = SimpleNamespace(
            Context=lambda: Context(self),
            Poller=lambda: Poller(self),
            Again=zmq.Again,
            NOBLOCK=zmq.NOBLOCK,
            POLLIN=zmq.POLLIN,
            IDENTITY=zmq.IDENTITY,
            **{name: getattr(zmq, name) for name in OPTIONS},
        )
        self.socket = SimpleNamespace(socketpair=self.pipe)

    def pipe(self) -> tuple["Pipe", "Pipe"]:
        """Both ends, of which the first is read."""
        ends = [Pipe(1_000_000 + len(self._pipes) + place) for place in range(2)]
        self._pipes |= {end.fileno(): end for end in ends}
        ends[1].other = ends[0]
        return ends[0], ends[1]

    def dies(self, address: str) -> None:
        """Whoever listens there is gone."""
        if socket := self._routers.pop(address, None):
            socket.close()

    def router(self, address: str) -> "Socket | None":
        return self._routers.get(address)

    def binds(self, address: str, socket: "Socket") -> None:
        self._routers[address] = socket

    def line(self, deliver: Callable[[Any], None]) -> Callable[[Any], None]:
        """A way for messages, which keep their order and arrive later."""
        under_way: deque[Any] = deque()

        def carry() -> None:
            while True:
                self._world.wait(lambda: bool(under_way))
                self._world.sleep(self._world.draw.expovariate(1 / DELAY))
                deliver(under_way.popleft())

        self._world.start("line", carry, "network")
        return under_way.append

    def wait(self, ready: Callable[[], bool], seconds: float | None) -> None:
        self._world.wait(ready, seconds)

    def readable(self, source: object) -> Readable:
        return self._pipes[source] if isinstance(source, int) else source  # type: ignore[return-value]


class Pipe:
    """One end of a socketpair."""

    other: "Pipe"

    def __init__(self, number: int) -> None:
        self._number, self.readable = number, False

    def fileno(self) -> int:
        return self._number

    def send(self, data: bytes) -> None:
        self.other.readable = True

    def recv(self, size: int = 0) -> bytes:
        self.readable = False
        return b"x"

    def setblocking(self, blocking: bool) -> None:
        pass

    def close(self) -> None:
        pass


class Context:
    """A zmq.Context."""

    def __init__(self, network: Network) -> None:
        self._network, self._sockets = network, list[Socket]()

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def socket(self, kind: int) -> "Socket":
        socket = Socket(self._network, kind == zmq.ROUTER)
        self._sockets.append(socket)
        return socket

    def destroy(self) -> None:
        for socket in self._sockets:
            socket.close()


class Socket:
    """A DEALER or a ROUTER."""

    def __init__(self, network: Network, routes: bool) -> None:
        self._network, self._routes = network, routes
        self.arrived: deque[Any] = deque()
        self._identity, self._address = b"", ""
        self._to_router: Callable[[Any], None] | None = None
        self.dealers: dict[bytes, Callable[[Any], None]] = {}
        self.closed = False

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.IDENTITY:
            self._identity = value

    def bind(self, address: str) -> None:
        self._network.binds(address, self)

    def get_monitor_socket(self, events: int) -> "Socket":
        """One at which nothing arrives."""
        return Socket(self._network, False)

    def connect(self, address: str) -> None:
        self._address = address
        self._to_router = self._network.line(self._deliver)

    def close(self) -> None:
        self.closed = True

    @property
    def readable(self) -> bool:
        return bool(self.arrived)

    def poll(self, milliseconds: int) -> bool:
        return self.readable

    def send(self, data: bytes, flags: int = 0) -> None:
        if self._network.router(self._address) is None:
            raise zmq.Again
        assert self._to_router
        self._to_router((self._network.router(self._address), data))

    def recv(self, flags: int = 0) -> Any:
        if not self.arrived:
            raise zmq.Again
        return self.arrived.popleft()

    recv_multipart = recv

    def send_multipart(self, parts: list[bytes], flags: int = 0) -> None:
        identity, data = parts
        if identity in self.dealers:
            self.dealers[identity](data)

    def _deliver(self, message: tuple["Socket", bytes]) -> None:
        router, data = message
        if router.closed or self.closed:
            return
        if self._identity not in router.dealers:
            router.dealers[self._identity] = self._network.line(self.arrived.append)
        router.arrived.append([self._identity, data])


class Poller:
    """A zmq.Poller."""

    def __init__(self, network: Network) -> None:
        self._network, self._sources = network, list[object]()

    def register(self, source: object, events: int) -> None:
        self._sources.append(source)

    def unregister(self, source: object) -> None:
        self._sources.remove(source)

    def poll(self, milliseconds: int | None = None) -> list[tuple[object, int]]:
        def ready() -> list[tuple[object, int]]:
            return [(each, zmq.POLLIN) for each in self._sources if self._network.readable(each).readable]

        self._network.wait(lambda: bool(ready()), None if milliseconds is None else milliseconds / 1000)
        return ready()
