"""A process that keeps files and batches, what keys use and an audit log, while its disk is recorded
(power_cut.py): python cut_files.py FOLDER TRACE

It marks what it has acknowledged. `wrong_after` says what is wrong with a folder that a power cut has left.
"""

import ctypes
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import power_cut  # noqa: E402
from power_cut import Cut, Disk, Kind, Operation  # noqa: E402

from rwkv_batch.audit.lines import AuditError, verify  # noqa: E402
from rwkv_batch.audit.log import AuditLog  # noqa: E402
from rwkv_batch.batches.records import BatchRecord, RowResult, new_id  # noqa: E402
from rwkv_batch.batches.store import BatchStore, file_of  # noqa: E402
from rwkv_batch.keys.usage import UsageStore, Used  # noqa: E402

DAYS = 30
ROWS = 2
USAGE, AUDIT = "usage.db", "audit.jsonl"


def main(folder: Path, trace: Path) -> None:
    """Does not return."""
    library = ctypes.CDLL(None)
    library.disk_trace_start(str(trace).encode())

    def mark(what: str, name: str, value: Any = None) -> None:
        data = json.dumps([what, name, value]).encode()
        library.disk_trace_mark(data, len(data))

    keys = folder / "keys"  # of its own: SQLite syncs the folder of its log
    keys.mkdir()
    store, used, log = BatchStore(folder / "batches"), UsageStore(keys / USAGE), AuditLog(keys / AUDIT)
    for number in range(3):
        text = f"{number} " * 3000

        def write(path: Path, text: str = text) -> int:
            return path.write_text(text)

        name = store.add_file(file_of("anna", f"{number}.jsonl"), write).id
        mark("file", name, text)
        batch = BatchRecord(
            id=new_id("batch_"),
            owner="anna",
            endpoint="/v1/chat/completions",
            input_file=name,
            window="24h",
            created=int(time.time()),
            expires=int(time.time()) + 86400,
        )
        store.add_batch(batch)
        mark("batch", batch.id, "validating")
        store.change(batch.id, ["validating"], "in_progress", total=ROWS)
        for line in range(ROWS):
            store.put_result(batch.id, RowResult(line, True, f"row {line}"))
        output = store.write_results(batch, succeeded=True)
        store.change(batch.id, ["in_progress"], "completed", output_file=output, completed=ROWS)
        store.forget_results(batch.id)
        mark("batch", batch.id, "completed")
        used.add([Used("anna", "demo", "2026-01-01", 1, 10, 0, 5)])
        for line in range(2):
            log.add({"number": number, "line": line})
        if number == 1:
            log.close()
            mark("synced", AUDIT, 4)
            log = AuditLog(keys / AUDIT)
        mark("removing", name)
        assert store.remove_file(name)
        mark("removed", name)
    log.close()
    library.disk_trace_exit()


def record(folder: Path) -> tuple[Path, list[Operation]]:
    """The disk, and what has happened to it."""
    disk, trace = folder / "disk", folder / "trace"
    disk.mkdir()
    power_cut.run([sys.executable, __file__, str(disk), str(trace)], str(disk), folder)
    return disk, power_cut.read_trace(trace)


def wrong_after(cuts: Iterable[Cut], disk: Path, operations: list[Operation], folder: Path) -> Iterator[str]:
    """What is wrong after each cut, of which none is before an earlier one."""
    left = Disk(disk, operations)
    for number, cut in enumerate(cuts):
        target = folder / f"cut {number}"
        left.rebuild(cut, target)
        marks = [json.loads(each.data) for each in operations[: cut.position] if each.kind is Kind.MARK]
        try:
            wrong = [*_wrong(target, marks), *_wrong_with_keys(target / "keys", marks)]
        except Exception as error:
            wrong = [repr(error)]
        yield from (f"{cut}: {each}" for each in wrong)


def _wrong(target: Path, marks: list[tuple[str, str, Any]]) -> Iterator[str]:
    store = BatchStore(target / "batches")
    store.expire(DAYS)
    listed, gone = (
        {file.id for file in store.files()},
        {name for what, name, _ in marks if what == "removing"},
    )
    for what, name, value in marks:
        if what == "file" and name not in gone:
            if name not in listed:
                yield f"the file {name} is lost"
            elif store.path(name).read_text() != value:
                yield f"the file {name} is another one"
        if what == "removed" and name in listed:
            yield f"the file {name}, which was removed, is back"
        if what == "batch":
            batch = store.batch(name)
            if batch is None or value not in ("validating", batch.status):
                yield f"the batch {name} is {batch}"
    for batch in store.batches():
        if batch.status == "completed" and batch.output_file:
            text = store.path(batch.output_file).read_text()
            if text != "".join(f"row {line}\n" for line in range(ROWS)):
                yield f"the answers of {batch.id} are {text!r}"
    for name in listed:
        if not store.path(name).exists():
            yield f"the file {name} is listed without contents"
    store.close()


def _wrong_with_keys(keys: Path, marks: list[tuple[str, str, Any]]) -> Iterator[str]:
    keys.mkdir(exist_ok=True)
    usage = UsageStore(keys / USAGE)
    usage.add([Used("eve", "demo", "2026-01-01", 1, 1, 0, 1)])
    for each in usage.read("anna"):
        if (each.prompt_tokens, each.completion_tokens) != (10 * each.requests, 5 * each.requests):
            yield f"{each} was used"
    usage.close()
    log = AuditLog(keys / AUDIT)
    log.add({"after": "the cut"})
    log.close()
    with (keys / AUDIT).open("rb") as file:
        try:
            lines, _ = verify(file)
        except AuditError as error:
            yield f"the audit log: {error}"
            return
    synced = max((value for what, _, value in marks if what == "synced"), default=0)
    if lines <= synced:
        yield f"the audit log has {lines} lines of {synced} that were on the disk, and one more"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
