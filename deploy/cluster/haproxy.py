#!/usr/bin/env python3
"""Write the configuration of HAProxy for these servers: deploy/cluster/haproxy.cfg with them in it.

    python deploy/cluster/haproxy.py [--listen [HOST]:PORT] [--socket FILE] [--slots N]
                                     [--user NAME] [HOST:PORT ...]

--slots: how many servers there may be. Those that no address is given for are filled by sync_haproxy.py.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = Path(__file__).with_name("haproxy.cfg")
NOBODY = "127.0.0.1:9"  # of a slot without a server
SERVERS = re.compile(r"(?:^    server s\d+ .*\n)+", re.MULTILINE)


def configuration(
    servers: Sequence[str], listen: str, socket: str, slots: int = 0, user: str = "haproxy"
) -> str:
    """The text of the file. servers: "host:port" of each, in the order of their slots.

    user: whose rights it has once it listens; "": those of who starts it, who is not root.
    """
    places = [*servers, *[NOBODY] * (slots - len(servers))]
    text = TEMPLATE.read_text(encoding="utf-8")
    for backend, more in (("sessions", " check"), ("anywhere", "")):
        lines = [
            f"    server s{i} {place} id {i}{more}{' disabled' if place is NOBODY else ''}\n"
            for i, place in enumerate(places, 1)
        ]
        at = text.index(f"\nbackend {backend}\n")
        text = text[:at] + SERVERS.sub("".join(lines), text[at:], count=1)
    text = re.sub(r"(?m)^    (user|group) .*\n", rf"    \1 {user}\n" if user else "", text)
    text = re.sub(r"(?m)^    bind .*$", f"    bind {listen}", text, count=1)
    return re.sub(r"(?m)^    stats socket \S+", f"    stats socket {socket}", text, count=1)


def main() -> None:
    summary, usage = (__doc__ or "").split("\n\n")[:2]
    parser = argparse.ArgumentParser(description=summary, usage=usage.strip().removeprefix("python "))
    parser.add_argument("servers", nargs="*", metavar="HOST:PORT")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        metavar="[HOST]:PORT",
        help="where clients come; :8000 is every network",
    )
    parser.add_argument("--socket", default="/run/haproxy-rwkv.sock", help="by which servers are changed")
    parser.add_argument("--slots", type=int, default=0, help="servers that there may be (those given)")
    parser.add_argument(
        "--user",
        default="haproxy",
        metavar="NAME",
        help='whose rights it has once it listens (haproxy); "": those of who starts it, who is not root',
    )
    given = parser.parse_args()
    if not given.servers and not given.slots:
        parser.error("name the servers, or say with --slots how many there may be")
    print(configuration(given.servers, given.listen, given.socket, given.slots, given.user), end="")


if __name__ == "__main__":
    main()
