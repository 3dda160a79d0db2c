"""The memory of the process that runs the tests, where several run beside servers."""

import ctypes
import gc
import os

GROWN = 128 << 20  # bytes since the last time, after which unused memory is looked for
PAGE = os.sysconf("SC_PAGE_SIZE")
malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class OwnMemory:
    """What of it can go back to the system."""

    def __init__(self) -> None:
        self._last = self._least = 0

    def begin(self) -> None:
        """What has been imported and collected stays, and is not looked at again."""
        gc.collect()
        gc.freeze()
        self._last = self._least = resident()

    def give_back(self, at_once: bool) -> None:
        """Free what nobody uses, if that may be much: parts of an engine know each other.

        at_once: also where little has come since the last time, as what was in use then may be free now.
        """
        now = resident()
        if now > self._last + GROWN or (at_once and now > self._least + GROWN):
            gc.collect()
            if malloc_trim:
                malloc_trim(0)
            self._last = resident()
            self._least = min(self._least, self._last)


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE
