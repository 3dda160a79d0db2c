"""Runs a file of requests without a server: python -m rwkv_batch.batch in.jsonl out.jsonl [flags of app.py]

The lines are those of a batch of /v1/batches, of any of its routes. Answers come into the second file as they
are made, rows that fail into a third one. Run again after an interrupt, it does what is left.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from tqdm import tqdm

from app import parse
from rwkv_batch.batches.file_rows import FileRows, NoAnswers, claimed, done_in
from rwkv_batch.batches.lines import check
from rwkv_batch.batches.runner import Width
from rwkv_batch.config import ServerConfig, on_each
from rwkv_batch.ops.progress import hidden
from rwkv_batch.processes.child import CannotStart, Child
from rwkv_batch.processes.folder import SOCKET, NoFolder, runtime_folder
from rwkv_batch.supervisor import refuse, run_engine
from rwkv_batch.wire.client import Client
from rwkv_batch.wire.supervision import LoadFailure, Serving, Stop

INCOMPLETE = 1  # the exit code


def main(arguments: list[str]) -> int:
    """The exit code: 0 if all rows are answered, 1 if some have failed or are left, 2 for what cannot run."""
    parser = argparse.ArgumentParser(prog="python -m rwkv_batch.batch", description=__doc__)
    parser.add_argument("input", type=Path, metavar="IN", help="JSONL with custom_id, url and body")
    parser.add_argument("output", type=Path, metavar="OUT", help="the answers, one line a row as it ends")
    parser.add_argument("--errors", type=Path, metavar="FILE", help="rows that fail (OUT.errors)")
    files, flags = parser.parse_known_args(arguments)
    files.errors = files.errors or files.output.with_name(f"{files.output.name}.errors")
    config = parse(["--state-db", ":memory:", "--log-level", "WARNING", *flags])
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    if len(config.devices) > 1:
        return refuse("a file runs on one device or in one pipeline; name one with --device")
    if len({path.resolve() for path in (files.input, files.output, files.errors)}) < 3:
        return refuse("the requests, the answers and --errors are three files; name different ones")
    try:
        with open(files.input, "rb") as lines:
            total, errors = check(lines, "")
        if errors:
            return refuse(f"{files.input}, line {errors[0].line or 1}: {errors[0].message}")
        with runtime_folder() as folder, open(files.output, "a", encoding="utf-8") as output:
            if not claimed(output):
                return refuse(f"{files.output} is being written by another run; wait until that has ended")
            done = done_in(files.output)
            with open(files.errors, "w", encoding="utf-8") as failed:
                return _run(config, folder, FileRows(files.input, total, done, output, failed))
    except CannotStart as error:
        return refuse(f"{error.strerror}; raise the limit of tasks, or run the same command later")
    except OSError as error:
        if error.filename is None:  # a file that is open is not named
            return refuse(
                f"{files.output} cannot be written ({error.strerror}); make room, and run the same command "
                "for the rows that are left"
            )
        return refuse(f"{error.filename} cannot be used ({error.strerror}); name another file")
    except (NoAnswers, NoFolder) as error:
        return refuse(str(error))


def _run(config: ServerConfig, folder: Path, rows: FileRows) -> int:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)  # which is read when the routes are imported
    from routes.batching import answers, of_rows, rows_at_once
    from routes.http.frontend import Frontend

    address = f"ipc://{folder / SOCKET}"
    (configs,) = on_each(config.engines, config.devices, folder)
    engine = Child("engine", run_engine, configs, address, [])
    try:
        first = _hear(engine.control)
        if not isinstance(first, Serving):
            return refuse(first.message) if first else INCOMPLETE
        front = Frontend(of_rows(config.frontend), Client(address, "batch"))
        front.serve(first.models)
        width = Width(lambda: rows_at_once(front))
        bar = tqdm(total=rows.total, initial=len(rows.done), unit="row", disable=hidden())
        with bar:
            work = rows.run(answers(front), width, bar.update)
            died = asyncio.run(_until_over(work, engine.control))
    finally:
        engine.send(Stop())
        engine.close()
    if died:
        print("error: the engine has died; run the same command for the rows that are left", file=sys.stderr)
        return INCOMPLETE
    print(f"{rows.total - rows.errors} of {rows.total} rows are answered", file=sys.stderr)
    return 0 if not rows.errors else INCOMPLETE


def _hear(control: Connection) -> Serving | LoadFailure | None:
    """The next message of the engine; None: it has died."""
    try:
        message: Serving | LoadFailure = control.recv()
    except (EOFError, OSError):
        return None
    return message


async def _until_over(rows: Coroutine[None, None, None], control: Connection) -> bool:
    """Whether the engine has died before all rows were answered."""
    loop, work = asyncio.get_running_loop(), asyncio.ensure_future(rows)

    def watch() -> None:
        while _hear(control):
            pass
        with suppress(RuntimeError):  # all is over
            loop.call_soon_threadsafe(work.cancel)

    Thread(target=watch, name="engine", daemon=True).start()
    try:
        await work
    except asyncio.CancelledError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
