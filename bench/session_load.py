#!/usr/bin/env python3
"""Over HTTP: turns of sessions next to the same requests without one, forks, moves, many; translations.

    python bench/session_load.py turns [--sessions 16 64 256] [--turns 3] [--tokens 100] [-- APP_FLAGS]
    python bench/session_load.py mixed [--streams 128] [--sessions 128] [--long 4000] [-- APP_FLAGS]
    python bench/session_load.py forks [--forks 2000] [--history 4000] [-- APP_FLAGS]
    python bench/session_load.py many [--sizes 1000 100000] [-- APP_FLAGS]
    python bench/session_load.py moves [--history 4000] [--store URL] [-- --state-db postgresql://... FLAGS]
    python bench/session_load.py translations [--texts 1000] [--clients 64] [--each 8] [-- APP_FLAGS]

Each starts a server of its own with APP_FLAGS and a database in a temporary folder (TMPDIR says where). With
--url all but `many` measure a server that runs already, and leave their sessions there. Results
are printed as they come; --markdown writes them as a page too. Exit code 1 if a request fails.
"""

import argparse
import asyncio
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
from fsspec.core import url_to_fs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test" / "helpers"))

from translated import TERMS, broken, generated, lacking

from bench import startup
from bench.compare import label, machine
from bench.load import base_url
from bench.processes import GeneratorLost, Generators
from bench.serve import at_least, find_server
from bench.serve_all import Server
from bench.turn_load import (
    ENDLESS,
    LoadFailed,
    TurnFigures,
    TurnPlan,
    answers,
    begin_session,
    plan_for,
    resumption,
    run_one_by_one,
    seconds_to_fork,
    seconds_to_list,
    stored_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
LISTED = 100  # sessions that one /state/status asks for
ASKS = 9  # of /state/status; their median counts


class Page:
    """Lines that are printed as they come and kept for the markdown page."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, *lines: str) -> None:
        self._lines += lines
        print(*lines, sep="\n", flush=True)

    def write(self, file: Path, title: str, command: list[str]) -> None:
        head = [
            f"# Over HTTP: {title}",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}, commit {label(ROOT)}, {machine()}.",
            "",
            f"    python bench/session_load.py {shlex.join(command)}",
            "",
        ]
        file.write_text("\n".join([*head, *self._lines]) + "\n", encoding="utf-8")


@contextmanager
def started(app_flags: list[str], folder: Path) -> Iterator[str]:
    """A server of our own with its database, sessions.db, in the folder."""
    server = Server(app_flags, folder)
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


@contextmanager
def measured(options: argparse.Namespace) -> Iterator[tuple[str, Path | None]]:
    """The server to measure, and its database if that is known."""
    if options.url:
        find_server(options.url, {})
        yield options.url, options.database
        return
    with tempfile.TemporaryDirectory() as place, started(options.app_flags, Path(place)) as url:
        yield url, Path(place) / "sessions.db"


def new_ids(count: int) -> tuple[str, ...]:
    """Ids of sessions that do not exist."""
    run = uuid.uuid4().hex[:8]
    return tuple(f"{run}-{number}" for number in range(count))


def turns(options: argparse.Namespace, page: Page) -> None:
    """Sessions in turns, then the same requests without sessions, in rounds.

    With --beside the same at a server with that database, in turns with the first one.
    """
    processes = min(options.processes, *options.sessions)
    with ExitStack() as stack:
        url, _ = stack.enter_context(measured(options))
        places = {"session turns": url}
        if options.beside:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            flags = ["--state-db", options.beside, "--image-store", str(place)]
            other = stack.enter_context(started([*options.app_flags, *flags], place))
            places[f"session turns, {options.beside.partition('://')[0]}"] = other
        clients = stack.enter_context(Generators(processes))
        page.add(
            f"{options.turns} turns of {options.tokens} tokens, {options.think:g} s between them; "
            f"{options.rounds} rounds. End: from the last event but one to the end of the stream.",
            "",
            "| at once | requests | a second | tokens/s | of stateless (single rounds) "
            "| first token, ms | P99 | end, ms | P99 |",
            "|---|---|---|---|---|---|---|---|---|",
        )
        for count in options.sessions:
            plan = plan_for(url, count, options.turns * count, options.tokens, think=options.think)
            once = replace(plan, requests=count)  # not counted
            stateful, stateless = {name: TurnFigures() for name in places}, TurnFigures()
            for at in places.values():
                answers(clients, replace(once, url=at, sessions=new_ids(count)))
                answers(clients, replace(once, url=at))
            for _ in range(options.rounds):
                for name in random.sample([*places], len(places)):
                    asked = replace(plan, url=places[name], sessions=new_ids(count))
                    stateful[name].add(answers(clients, asked), options.tokens)
                stateless.add(answers(clients, plan), options.tokens)
            for name, figures in stateful.items():
                page.add(turn_row(f"{count} | {name}", figures, ratio(figures, stateless)))
            page.add(turn_row(f"{count} | stateless", stateless, ""))
        page.add("", busiest(clients))


def turn_row(name: str, figures: TurnFigures, times: str) -> str:
    rates = f"{figures.turns / figures.seconds:.1f} | {figures.rate:.0f} | {times}"
    return f"| {name} | {rates} | {figures.cells('ttft_ms')} | {figures.cells('end_ms')} |"


def ratio(stateful: TurnFigures, stateless: TurnFigures) -> str:
    """Tokens/s of the first to those of the second, and its range over single rounds."""
    single = [a / b for a, b in zip(stateful.rates, stateless.rates, strict=True)]
    return f"{stateful.rate / stateless.rate:.3f} ({min(single):.3f} to {max(single):.3f})"


def busiest(clients: Generators) -> str:
    busy = ": too busy to measure well, raise --processes" if clients.cpu > 0.9 else ""
    return f"Load generator: {clients.cpu:.0%} of a core in the busiest process{busy}."


def mixed(options: argparse.Namespace, page: Page) -> None:
    """Inter-token times of stateless streams beside long prompts, without and with more rows, in rounds.

    Rows of any kind lengthen a step, so the last kind has streams in place of the sessions.
    """
    processes = min(options.processes, options.streams)
    with measured(options) as (url, _), Generators(processes) as clients:
        streams = plan_for(url, options.streams, options.turns * options.streams, options.tokens)
        extra = {"use_prefix_cache": False}
        long = plan_for(url, options.long_prompts, ENDLESS, 1, options.long, extra=extra)
        more = plan_for(url, options.sessions, ENDLESS, options.tokens)
        kinds: dict[str, Callable[[], list[TurnPlan]]] = {
            "nothing else": lambda: [],
            f"{options.sessions} sessions": lambda: [replace(more, sessions=new_ids(options.sessions))],
            f"{options.sessions} more streams": lambda: [more],
        }
        figures = {name: TurnFigures() for name in kinds}
        answers(clients, replace(streams, requests=options.streams), long)  # not counted
        for _ in range(options.rounds):
            for name, beside in kinds.items():
                figures[name].add(answers(clients, streams, long, *beside()), options.tokens)
        page.add(
            f"{options.streams} stateless streams of {options.turns} times {options.tokens} tokens, whose "
            f"figures these are, and {options.long_prompts} prompts of {options.long} tokens at a time; "
            f"{options.rounds} rounds.",
            "",
            "| beside them | tokens/s | inter-token, ms | P99 | to the first | between events, ms | P99 |",
            "|---|---|---|---|---|---|---|",
        )
        alone = figures["nothing else"].p99("itl_ms")
        for name, each in figures.items():
            page.add(
                f"| {name} | {each.rate:.0f} | {each.cells('itl_ms')} "
                f"| {each.p99('itl_ms') / alone:.2f} | {each.cells('event_gap_ms')} |"
            )
        page.add("", busiest(clients))


def forks(options: argparse.Namespace, page: Page) -> None:
    """Many copies of one session."""
    with measured(options) as (url, database):
        source, *names = new_ids(options.forks + 1)
        begin_session(url, source, options.history)
        before = stored_bytes(database)
        seconds = seconds_to_fork(url, source, names, options.connections)
        grown = {part: size - before[part] for part, size in stored_bytes(database).items()}
    page.add(
        f"{options.forks} forks of a session of {options.history} tokens, {options.connections} at a time: "
        f"{seconds:.2f} s, {options.forks / seconds:.0f} a second."
    )
    if grown:
        whole, parts = sum(grown.values()), ", ".join(f"{part} {size}" for part, size in grown.items())
        page.add(f"{whole} bytes more on disk, {whole / options.forks:.0f} a fork: {parts}.")


def many(options: argparse.Namespace, page: Page) -> None:
    """A server with databases of different sizes.

    All sessions are forks of one. Those that are resumed have had one turn since, so each has a state of its
    own; then the server is started again, and none is in memory.
    """
    page.add(
        f"Forks of a session of {options.history} tokens. Medians of {options.rounds} starts, of "
        f"{options.samples} sessions resumed one by one, and of {ASKS} requests.",
        "",
        f"| sessions | start, s | first token of a resumed session, ms | P99 | status of {LISTED}, ms |",
        "|---|---|---|---|---|",
    )
    made = 1
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for size in sorted(options.sizes):
            chosen = random.Random(0).sample(range(size), min(options.samples, size))
            ids = tuple(f"s{number}" for number in chosen)
            with started(options.app_flags, folder) as url:
                if made == 1:
                    begin_session(url, "s0", options.history)
                names = (f"s{number}" for number in range(made, size))
                seconds_to_fork(url, "s0", names, options.connections)
                run_one_by_one(resumption(url, ids))
            made = size
            flags = [*options.app_flags, "--state-db", str(folder / "sessions.db")]
            starts = [startup.start(str(ROOT), flags) for _ in range(options.rounds)]
            with started(options.app_flags, folder) as url:
                run_one_by_one(plan_for(url, 1, 1, 2))  # not counted
                resumed = TurnFigures()
                resumed.add(run_one_by_one(resumption(url, ids)), 2)
                listed = [seconds_to_list(url, LISTED) for _ in range(ASKS)]
            page.add(
                f"| {size} | {statistics.median(starts):.2f} | {resumed.cells('ttft_ms')} "
                f"| {statistics.median(listed) * 1e3:.1f} |"
            )


def moves(options: argparse.Namespace, page: Page) -> None:
    """A session goes on at another server: from its tokens, and from its state in two ways."""
    turn = {"contents": ["\nOn:"], "temperature": 0, "stop_tokens": [], "stream": False}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (place / "secret").write_text(uuid.uuid4().hex, encoding="utf-8")
        store = options.store or f"file://{place}/store"
        peers, shared = ["--cluster-secret-file", str(place / "secret")], ["--image-store", store]
        flags = {
            "home": [*peers, *shared, "--replay-tokens", "1"],
            "tokens": [],
            "server": peers,
            "store": shared,
        }
        urls = {}
        for name, more in flags.items():
            (place / name).mkdir()
            with chdir(place / name):  # where its own states are
                urls[name] = stack.enter_context(started([*options.app_flags, *more], place / name))
        http, home = stack.enter_context(httpx.Client(timeout=600)), urls.pop("home")
        seconds: dict[str, list[float]] = {name: [] for name in urls}
        differ = 0
        objects, root = url_to_fs(store)
        for round_ in range(options.rounds + 1):
            source, *names = new_ids(1 + len(urls))
            begin_session(home, source, options.history)
            for name in names:
                body = {"session_id": source, "new_session_id": name}
                http.post(f"{home}/v1/state/fork", json=body).raise_for_status()
            while len(objects.find(root)) <= round_:  # written behind
                time.sleep(0.05)
            texts = set()
            for name, session in zip(random.sample([*urls], len(urls)), names, strict=True):
                body = turn | {"session_id": session, "max_tokens": 1}
                began = time.monotonic()
                http.post(f"{urls[name]}/state/chat/completions", json=body).raise_for_status()
                if round_:  # the first one is not counted
                    seconds[name].append(time.monotonic() - began)
                reply = http.post(f"{urls[name]}/state/chat/completions", json=body | {"max_tokens": 32})
                texts.add(reply.raise_for_status().json()["choices"][0]["message"]["content"])
            differ += len(texts) - 1
        page.add(
            f"A turn of one token after {options.history} tokens at a server that has not had the session; "
            f"median of {options.rounds} rounds.",
            "",
            "| from | ms (single rounds) | of the time from tokens |",
            "|---|---|---|",
        )
        tokens = statistics.median(seconds["tokens"])
        for name, times_ in seconds.items():
            singles = ", ".join(f"{1e3 * each:.0f}" for each in sorted(times_))
            median = statistics.median(times_)
            page.add(f"| {name} | {1e3 * median:.0f} ({singles}) | {median / tokens:.2f} |")
        page.add("", f"Greedy texts of 32 tokens that differ: {differ}.")


def translations(options: argparse.Namespace, page: Page) -> None:
    """Marks and terms of generated texts; clients with a paragraph each next to one request with all."""
    with measured(options) as (url, _), httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        wrong: list[str] = []
        for start in range(0, options.texts, 50):
            texts = [generated(number) for number in range(start, min(start + 50, options.texts))]
            answers = translated(http, texts, TERMS)
            pairs = list(zip(texts, answers, strict=True))
            wrong += [why for pair in pairs if (why := broken(*pair) or lacking(*pair, TERMS))]
        whole = options.texts - len(wrong)
        page.add(f"{options.texts} generated texts: marks and terms whole in {whole}", *wrong[:9], "")
        texts, terms = paragraphs(options.clients * options.each)
        page.add(
            f"{len(texts)} texts, {sum(any(t in x for t in terms) for x in texts)} of them with terms; "
            f"clients with one text at a time, and requests of {options.clients} texts:",
            "",
            "| round | one request, tokens/s | clients, tokens/s | share | clients, s | with terms, times "
            "| of CPU | one request, s | with terms, times | of CPU | of tokens |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        )
        rounds = [
            translation_round(http, url, options.clients, texts, terms) for _ in range(options.rounds + 1)
        ]
        for number, each in enumerate(rounds[1:], 1):  # the first one warms up
            page.add(f"| {number} | " + " | ".join(f"{value:.3g}" for value in each.values()) + " |")
        medians = [statistics.median(each[name] for each in rounds[1:]) for name in rounds[0]]
        page.add("| median | " + " | ".join(f"{value:.3g}" for value in medians) + " |")


class Spent(NamedTuple):
    """What something has taken."""

    seconds: float
    cpu: float  # seconds, of all processes that this one has started
    tokens: int  # that the server has made


def translation_round(
    http: httpx.Client, url: str, clients: int, texts: list[str], terms: dict[str, str]
) -> dict[str, float]:
    """The cells of one round. What is compared takes turns, as other work comes and goes."""
    together = spent(http, lambda: translated(http, texts, {}))
    kinds = ({}, terms)
    apart = [spent(http, lambda: asyncio.run(one_at_a_time(url, texts, clients, each))) for each in kinds * 2]  # noqa: B023
    parts = [texts[start : start + clients] for start in range(0, len(texts), clients)]
    alone = [spent(http, partial(translated, http, some, each)) for some in parts * 3 for each in kinds]
    tokens = [tokens_for(http, texts, each) for each in kinds]
    return {
        "together": together.tokens / together.seconds,
        "apart": apart[0].tokens / apart[0].seconds,
        "share": (apart[0].tokens / apart[0].seconds) / (together.tokens / together.seconds),
        "clients": apart[0].seconds,
        "clients with terms": times([each.seconds for each in apart]),
        "clients, CPU": times([each.cpu for each in apart]),
        "alone": statistics.median(each.seconds for each in alone[::2]),
        "alone with terms": times([each.seconds for each in alone]),
        "alone, CPU": times([each.cpu for each in alone]),
        "tokens": tokens[1] / tokens[0],
    }


def times(pairs: list[float]) -> float:
    """How many times as much the second of each pair is, by the sums; 0 where nothing is known."""
    less, more = sum(pairs[::2]), sum(pairs[1::2])
    return more / less if less else 0.0


def paragraphs(count: int) -> tuple[list[str], dict[str, str]]:
    """English sentences that the bundled model can translate, and terms for some of their nouns."""
    from demo.training import exam

    dice = random.Random(0)
    texts = [exam.finished(*dice.choice(exam.PATTERNS)(dice))[exam.EN] for _ in range(count)]
    nouns = [noun.en[0] for noun in exam.CLEAR if any(f" {noun.en[0]} " in text for text in texts)]
    return texts, {noun: f"Wort{number}" for number, noun in enumerate(nouns[:40])}


def translated(http: httpx.Client, texts: list[str], terms: dict[str, str]) -> list[str]:
    """Raises httpx.HTTPError."""
    body = {"source_lang": "en", "target_lang": "de", "text_list": texts, "glossary": terms}
    answer = http.post("/translate", json=body).raise_for_status().json()
    return [each["text"] for each in answer["translations"]]


async def one_at_a_time(url: str, texts: list[str], clients: int, terms: dict[str, str]) -> None:
    """Each client sends its texts one after the other, as plugins do. Raises httpx.HTTPError."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as http:

        async def client(number: int) -> None:
            for text in texts[number::clients]:
                body = {"source_lang": "en", "target_lang": "de", "text_list": [text], "glossary": terms}
                (await http.post("/translate", json=body)).raise_for_status()

        await asyncio.gather(*map(client, range(clients)))


def spent(http: httpx.Client, run: Callable[[], object]) -> Spent:
    """What that takes."""
    tokens, cpu, began = tokens_of(http, "generation_tokens"), cpu_seconds(), time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return Spent(seconds, cpu_seconds() - cpu, tokens_of(http, "generation_tokens") - tokens)


def cpu_seconds() -> float:
    """Of the processes that this one has started, and of theirs: hardly more on a machine that is busy."""
    parents, ticks = {}, {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = place.read_text(encoding="utf-8").rpartition(")")[2].split()
            parents[int(place.parent.name)] = int(fields[1])
            ticks[int(place.parent.name)] = int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {each for each, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks[each] for each in ours - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def tokens_for(http: httpx.Client, texts: list[str], terms: dict[str, str]) -> int:
    """Tokens that are read and made for these texts."""
    kinds = "prompt_tokens", "generation_tokens"
    before = tokens_of(http, *kinds)
    translated(http, texts, terms)
    return tokens_of(http, *kinds) - before


def tokens_of(http: httpx.Client, *kinds: str) -> int:
    models = http.get("/stats").raise_for_status().json()["models"]
    return sum(each[kind] for each in models for kind in kinds)


MEASUREMENTS = {
    "turns": turns,
    "mixed": mixed,
    "forks": forks,
    "many": many,
    "translations": translations,
    "moves": moves,
}


def number(command: argparse.ArgumentParser, name: str, default: object, about: str, **more) -> None:
    """An option that is a whole number above 0."""
    about = f"{about} (default %(default)s)"
    command.add_argument(name, type=at_least(1), default=default, help=about, **more)


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options, with the flags behind "--" as `app_flags`."""
    parser = argparse.ArgumentParser(
        prog="bench/session_load.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(url=None, database=None)
    commands = parser.add_subparsers(dest="what", required=True)
    what = {name: commands.add_parser(name, help=run.__doc__) for name, run in MEASUREMENTS.items()}
    for name, command in what.items():
        command.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a page")
        if name not in ("many", "moves"):
            command.add_argument("--url", type=base_url, help="a server that runs already")
        if name != "forks":
            number(command, "--rounds", 3 if name == "many" else 2, "of everything, or starts of the server")
        if name in ("turns", "mixed"):
            number(command, "--turns", 3 if name == "turns" else 10, "answers for each client")
            number(command, "--tokens", 100, "of an answer")
            number(command, "--processes", min(8, os.cpu_count() or 1), "of the load generator")
        elif name == "moves":
            number(command, "--history", 4000, "tokens of the session that moves")
            command.add_argument("--store", metavar="URL", help="for states (default: a folder)")
        elif name == "translations":
            number(command, "--texts", 1000, "generated, with marks and terms")
            number(command, "--clients", 64, "at once, and texts of a request with terms")
            number(command, "--each", 8, "paragraphs of a client")
        else:
            number(command, "--history", 4000, "tokens of the session that is forked")
            number(command, "--connections", 64, "forks at a time")
    number(what["turns"], "--sessions", [16, 64, 256], "at once, one measurement each", nargs="+")
    what["turns"].add_argument("--beside", metavar="URL", help="another database, at a server of its own")
    think = at_least(0, float)
    what["turns"].add_argument("--think", type=think, default=0.0, help="seconds between a client's turns")
    number(what["mixed"], "--streams", 128, "stateless streams that are measured")
    number(what["mixed"], "--sessions", 128, "beside them")
    number(what["mixed"], "--long", 4000, "tokens of a long prompt")
    number(what["mixed"], "--long-prompts", 8, "at a time")
    number(what["forks"], "--forks", 2000, "how many")
    what["forks"].add_argument("--database", type=Path, help="of the server at --url, to see how it grows")
    number(what["many"], "--sizes", [1000, 100_000], "of the database, in sessions", nargs="+")
    number(what["many"], "--samples", 100, "sessions that are resumed")
    at = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:at])
    options.app_flags = argv[at + 1 :]
    if options.url and options.app_flags:
        parser.error("--url names a server that runs already, so there is no use for APP_FLAGS")
    return options


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options, page = parse_options(argv), Page()
    try:
        MEASUREMENTS[options.what](options, page)
    except (LoadFailed, GeneratorLost, httpx.HTTPError) as error:
        print(f"bench/session_load.py: {error}", file=sys.stderr)
        return 1
    if options.markdown:
        page.write(options.markdown, options.what, argv)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
