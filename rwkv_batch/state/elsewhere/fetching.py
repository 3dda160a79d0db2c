"""States that other servers have made, fetched where that is faster than feeding the tokens before them.

A source that fails is not asked again for a while, and a fetch takes at most as long as it could save: then
the tokens are fed, as if there were no state.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rwkv_batch.state.elsewhere.objects import Objects
from rwkv_batch.state.elsewhere.peers import Peers
from rwkv_batch.state.elsewhere.whereabouts import Copy, Whereabouts
from rwkv_batch.state.entries import StoreError

RATE = 100e6  # bytes a second, until a source has been measured
LATENCY = 0.01  # seconds of a fetch, beside its bytes
REST = 10.0  # seconds without asking a source that has failed
MEASURED = 60.0  # seconds for which a measured rate counts
LEAST, MOST = 0.25, 5.0  # seconds for all fetches of one session
ATTEMPTS = 4  # fetches for one session

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sources:
    """Where states of other servers are. `objects`: the URL of a store. `peers`: the servers themselves."""

    objects: str | None = None
    peers: Peers | None = None

    @property
    def address(self) -> str:
        """Where the others get this server's; "": they do not."""
        return self.peers.own if self.peers else ""


NOWHERE = Sources()


@dataclass
class _Source:
    """The store, or one server. `rate`: bytes a second, as measured."""

    name: str
    rate: float = RATE
    measured: float = 0.0
    rests_until: float = 0.0

    def expected(self, size: int) -> float:
        """Seconds that so many bytes take."""
        rate = self.rate if time.monotonic() - self.measured < MEASURED else RATE
        return LATENCY + size / rate

    def note(self, size: int, seconds: float) -> None:
        self.rate = (self.rate + size / max(seconds, 1e-6)) / 2
        self.measured = time.monotonic()

    def rest(self, error: StoreError) -> None:
        log.warning("%s Tokens are fed in place of states meanwhile.", error)
        self.rests_until = time.monotonic() + REST

    @property
    def rests(self) -> bool:
        return time.monotonic() < self.rests_until


@dataclass(frozen=True)
class Fetched:
    """A state as it came, not checked. `refuse`: it is not what it should be."""

    turn: int
    data: bytes
    source: str
    refuse: Callable[[], None] = field(repr=False)


class Elsewhere:
    """For the thread of reads. Nothing is raised: what cannot be had is not there."""

    def __init__(self, whereabouts: Whereabouts, peers: Peers | None, objects: Objects | None) -> None:
        self._whereabouts, self._peers, self._objects = whereabouts, peers, objects
        self._sources: dict[str, _Source] = {}

    def fetch(self, savings: Mapping[int, float], size: int) -> Iterator[Fetched]:
        """States at the ends of these turns, of about so many bytes, the most worth first.

        savings: seconds that each would save.
        """
        worth = {turn: seconds for turn, seconds in savings.items() if seconds > LATENCY}
        if not worth or not (self._peers or self._objects):
            return
        deadline = time.monotonic() + min(MOST, max(LEAST, max(worth.values())))
        try:
            copies = self._whereabouts.find([*worth], self._objects.url if self._objects else "")
        except StoreError:
            return
        copies.sort(key=lambda copy: -worth[copy.turn])
        places = [(copy, name) for copy in copies for name in self._places(copy)]
        for copy, name in places[:ATTEMPTS]:
            source = self._sources.setdefault(name, _Source(name))
            seconds = min(deadline - time.monotonic(), max(LEAST, worth[copy.turn]))
            if source.rests or seconds <= 0 or source.expected(size) > worth[copy.turn]:
                continue
            if found := self._read(source, copy, 2 * size, seconds):
                yield found

    def _places(self, copy: Copy) -> Iterator[str]:
        """Where to look for it: a server's memory is nearer than the store."""
        if self._peers and copy.address not in ("", self._peers.own):
            yield copy.address
        if self._objects and copy.stored:
            yield self._objects.url

    def _read(self, source: _Source, copy: Copy, most: int, seconds: float) -> Fetched | None:
        began = time.monotonic()
        stored = self._objects is not None and source.name == self._objects.url
        try:
            if stored and self._objects:
                data = self._objects.read(copy.turn, most, seconds)
            elif self._peers:
                data = self._peers.read(copy.address, copy.turn, most, seconds)
        except StoreError as error:
            source.rest(error)
            return None

        def refuse() -> None:
            if stored:
                try:
                    self._whereabouts.refuse(copy.turn)
                except StoreError as error:
                    log.warning("A damaged state stays in the image store: %s", error)
            else:
                source.rest(StoreError(f"The server {source.name} gives states that are damaged."))

        if data is None:
            if stored:
                refuse()
            return None
        source.note(len(data), time.monotonic() - began)
        return Fetched(copy.turn, data, source.name, refuse)
