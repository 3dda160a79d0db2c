"""Standard output and error that never fail or wait for long, as a log must not end what is served.

A disk for the log may be full, the program that reads it may have ended or stopped reading, the terminal may
be closed. Then what is written is lost, and the server goes on.
"""

import io
import os
import select
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

PATIENCE = 2.0  # seconds for a reader that has fallen behind; none before it has read again


def keep_streams() -> None:
    """Make sys.stdout and sys.stderr of this process such streams.

    Where 0, 1 or 2 is closed, it is opened on /dev/null: otherwise a database or a connection would get the
    number, and with it all that a library writes to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = kept(1, sys.stdout), kept(2, sys.stderr)


def kept(descriptor: int, before: TextIO | None = None) -> io.TextIOWrapper:
    """Such a stream over a descriptor, with the encoding of another one."""
    encoding = before.encoding if before else "utf-8"
    lines = io.BufferedWriter(_Forgiving(descriptor))
    return io.TextIOWrapper(lines, encoding=encoding, errors="backslashreplace", line_buffering=True)


class _Forgiving(io.FileIO):
    """A descriptor to write to. What it does not take is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._patience = PATIENCE
        self._may_wait = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        opened = descriptor
        if self._may_wait:
            # Opened once more, as O_NONBLOCK would hold for all programs that have the terminal or pipe open.
            with suppress(OSError):
                opened = os.open(
                    f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                )
        super().__init__(opened, "w", closefd=opened != descriptor)

    def write(self, data: "Buffer", /) -> int:
        view = memoryview(data)
        try:
            if not self._may_wait:
                return super().write(view) or 0
            written = super().write(view[: select.PIPE_BUF]) if self._is_ready() else None
        except OSError:
            written = None
        return view.nbytes if written is None else written

    def _is_ready(self) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        ready = bool(poll.poll(1000 * self._patience))
        self._patience = PATIENCE if ready else 0.0
        return ready
