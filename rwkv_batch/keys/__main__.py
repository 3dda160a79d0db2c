"""python -m rwkv_batch.keys: make, list and revoke keys of clients, and see what they have used."""

import argparse
import json
import sqlite3
import sys
import time
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import get_args

from rwkv_batch.keys import records
from rwkv_batch.keys.records import MOST, Key, KeysError, Priority
from rwkv_batch.keys.usage import FIRST_DAY, LAST_DAY, UsageStore, Used, usage_file

COLUMNS = ("key", "model", "day", "requests", "prompt", "cached", "completion")


def main(argv: list[str] | None = None) -> int:
    options = command_line().parse_args(argv)
    try:
        return int(options.run(options) or 0)
    except KeysError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rwkv_batch.keys", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="add|list|revoke|usage")

    def command(name: str, run: object, about: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about)
        made.add_argument("file", metavar="FILE", help="that of --keys")
        made.set_defaults(run=run)
        return made

    new = command("add", _add, "make a key, and print it; it is shown this once")
    new.add_argument("name", metavar="NAME", help="what it stores belongs to this name")
    new.add_argument("--models", type=_names, metavar="A,B", help="that it may use (default: all)")
    new.add_argument("--adapters", type=_names, metavar="A,B", help="the same; '' for none (default: all)")
    for flag, about in (
        ("--requests-per-minute", "that are taken"),
        ("--tokens-per-minute", "of prompts and answers together"),
        ("--tokens-per-day", "the same, UTC"),
        ("--rows", "that run at once"),
        ("--batch-bytes", "of its files of batches, with what came of them"),
    ):
        new.add_argument(flag, type=_count, metavar="N", help=f"{about} (default: no limit)")
    new.add_argument(
        "--priority",
        choices=get_args(Priority),
        default="interactive",
        help="of its rows (default %(default)s)",
    )
    new.add_argument("--no-sessions", dest="sessions", action="store_false", help="it may store nothing")
    new.add_argument("--admin", action="store_true", help="it sees what belongs to all, as --password does")
    new.add_argument("--ends", type=_day, metavar="DATE", help="the last day on which it is taken, UTC")

    listed = command("list", _list, "the keys of the file")
    listed.add_argument("--json", action="store_true", help="as JSON, a key a line")
    revoked = command("revoke", _revoke, "let a key be taken no more; a server sees it within a second")
    revoked.add_argument("name", metavar="NAME")
    used = command("usage", _usage, "what keys have used, by model and day (UTC)")
    used.add_argument("--key", metavar="NAME", help="of this one (default: all)")
    used.add_argument("--start", type=_day, metavar="DATE", help="the first day")
    used.add_argument("--end", type=_day, metavar="DATE", help="the last day")
    used.add_argument("--json", action="store_true", help="as JSON, an entry a line")
    return parser


def _add(options: argparse.Namespace) -> None:
    fields = {name: getattr(options, name) for name in Key.__struct_fields__ if hasattr(options, name)}
    secret = records.add(options.file, Key(hash="", place=0, created=0.0, **fields))
    print(f"the key of {options.name}, which is kept nowhere:", file=sys.stderr)
    print(secret)


def _list(options: argparse.Namespace) -> None:
    keys = records.read(options.file)
    if options.json:
        for key in keys:
            print(json.dumps({name: getattr(key, name) for name in key.__struct_fields__ if name != "hash"}))
        return
    rows = [[key.name, _state(key), key.priority, _limits(key)] for key in keys]
    _print_table(("name", "state", "priority", "may"), rows)


def _revoke(options: argparse.Namespace) -> None:
    records.revoke(options.file, options.name)
    print(f"{options.name} is revoked", file=sys.stderr)


def _usage(options: argparse.Namespace) -> None:
    records.read(options.file)
    path = usage_file(options.file)
    found: list[Used] = []
    if Path(path).exists():
        with closing(UsageStore(path)) as store:
            try:
                found = store.read(options.key, options.start or FIRST_DAY, options.end or LAST_DAY)
            except sqlite3.Error as error:
                raise KeysError(f"{path} cannot be read ({error}); move it away if it is damaged") from None
    if options.json:
        for used in found:
            print(json.dumps(used._asdict()))
        return
    _print_table(COLUMNS, [[*map(str, used)] for used in found])


def _state(key: Key) -> str:
    if key.revoked is not None:
        return f"revoked {time.strftime('%Y-%m-%d', time.gmtime(key.revoked))}"
    return "ended" if key.ended else f"until {key.ends}" if key.ends else "taken"


def _limits(key: Key) -> str:
    parts = [
        key.admin and "everything",
        key.models is not None and f"models {','.join(key.models) or 'none'}",
        key.adapters is not None and f"adapters {','.join(key.adapters) or 'none'}",
        key.requests_per_minute is not None and f"{key.requests_per_minute} requests/min",
        key.tokens_per_minute is not None and f"{key.tokens_per_minute} tokens/min",
        key.tokens_per_day is not None and f"{key.tokens_per_day} tokens/day",
        key.rows is not None and f"{key.rows} rows",
        key.batch_bytes is not None and f"{key.batch_bytes} bytes of batches",
        not key.sessions and "no sessions",
    ]
    return "; ".join(part for part in parts if part) or "all"


def _print_table(head: tuple[str, ...], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if not 0 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use 0 or more")
    return number


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day; write it as 2027-01-31") from None


if __name__ == "__main__":
    sys.exit(main())
