"""Which servers there are: what Ray's replicas say, and what each HAProxy is given.

Slots are numbers from 1 on. A session is hashed to a slot, so a server that takes the place of another gets
its slot, and all HAProxies agree on them. `Directory` knows nothing of Ray; `servers.py` makes an actor
of it. It has nothing to lose: when it is started again, every server says within a second which slot it has.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

SILENT = 3.0  # seconds without an announcement until a server's slot is another's


@dataclass
class Entry:
    """A server. `leaving`: it drains, and takes nothing new."""

    slot: int
    address: str
    seen: float
    leaving: bool = False


class Directory:
    """`clock` gives seconds."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._clock, self._began = slots, clock, clock()
        self._entries: dict[str, Entry] = {}  # by the ids of servers

    def announce(self, server: str, address: str, slot: int = 0) -> int:
        """The server is ready at this address; its slot, or 0 if none is free. slot: what it had before."""
        entry, now = self._entries.get(server), self._clock()
        if entry and entry.leaving:  # it was on its way before that
            return entry.slot
        others = (each for name, each in self._entries.items() if name != server)
        taken = {each.slot for each in others if self._is_there(each)}
        wanted = (entry.slot if entry else slot, *range(1, self._slots + 1))
        found = next((number for number in wanted if number and number not in taken), 0)
        if found:
            self._entries[server] = Entry(found, address, now)
        return found

    def leave(self, server: str) -> None:
        """It takes no new requests from now on, and another may have its slot."""
        if entry := self._entries.get(server):
            entry.leaving = True

    def servers(self) -> tuple[dict[int, str], bool]:
        """The addresses of those that take requests, by their slots, and whether these are all."""
        now = self._clock()
        self._entries = {name: each for name, each in self._entries.items() if now - each.seen < 10 * SILENT}
        there = {each.slot: each.address for each in self._entries.values() if self._is_there(each)}
        return there, now - self._began > SILENT

    def _is_there(self, entry: Entry) -> bool:
        return not entry.leaving and self._clock() - entry.seen < SILENT
