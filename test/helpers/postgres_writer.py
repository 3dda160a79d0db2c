"""A server that appends turns to a session until its input ends: `python postgres_writer.py URL NAME FOLDER`.

It prints the id of each turn that is acknowledged, and "refused" for each that is not. Then it goes on from
what the database has.
"""

import select
import sys
from pathlib import Path

from stores import next_turn, session

from rwkv_batch.state.entries import NONE, PutSession, PutTurn, Refused
from rwkv_batch.state.postgres.store import PostgresStore

KEY = "a"


def main(url: str, name: str, folder: str) -> None:
    store = PostgresStore(url, Path(folder), name=name, stopped_ms=200)
    ids = store.turn_numbers()
    head = None
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        turn = next_turn(next(ids), head)
        put = PutSession(session(KEY, turn), follows=head.id if head else NONE)
        (outcome,) = store.commit([[PutTurn(turn), put]])
        if isinstance(outcome, Refused):
            found = store.find_session(KEY)
            head = store.read_turn(found.head.turn) if found else None
            print("refused", flush=True)
        else:
            head = turn
            print(turn.id, flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
