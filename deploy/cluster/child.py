"""A server that ends with whoever has started it.

    python deploy/cluster/child.py COMMAND ...      with a pipe as standard input

The command gets SIGTERM when this process does, or when the pipe is closed, also because the process at its
other end was killed. The exit code is the command's.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    server: subprocess.Popen[bytes] | None = None
    ended = threading.Event()

    def end(*_: object) -> None:
        ended.set()
        if server and server.poll() is None:
            server.send_signal(signal.SIGTERM)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end()

    for number in (signal.SIGTERM, signal.SIGINT):  # before there is a server that could be left behind
        signal.signal(number, end)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    if ended.is_set():  # meanwhile
        end()
    threading.Thread(target=watch, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
