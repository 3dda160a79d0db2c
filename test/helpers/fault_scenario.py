"""A server that is used in every way that touches its disk, and a plain model of what it has acknowledged.

Whoever makes something fail in it (faults.py, among others) runs a step of fault_steps.py and then has it
checked: every request had an answer, what was acknowledged is there and nothing else, and no open file,
process or file on the disk stays behind.

    with Scenario(folder) as place:
        for step in STEPS.values():
            place.run(step)
            assert not place.check()
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from serving import ROOT, Server, alive, until

from rwkv_batch.audit.lines import verify
from rwkv_batch.keys.records import Key, add
from rwkv_batch.state.entries import UNKNOWN

PATIENCE = 40.0  # seconds for an answer: a request that has none by then hangs
BACK = 300.0  # seconds until what has died serves again: an engine starts slowly on cores that others use
SETTLED = 20.0  # seconds until files and processes are what they were
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "max_tokens": 4, "stop_tokens": []}
OVER = ("completed", "failed", "expired", "cancelled")  # statuses of batches
CLEAR = (503, 507)  # statuses that say: not now
REFILLED = re.compile(r"-\d+$")  # of front ends, which have another number each time
# What each process of a kind opens when it first needs it, and keeps open: so many times at least.
OPENED = {
    "engine": Counter({"sessions.db": 2}),  # to find sessions, and to read them
    "frontend": Counter({"keys.json.usage.db": 1, "batches/batches.db": 1}),
    "batches": Counter({"keys.json.usage.db": 1, "tmp/rwkv-N/counts/counter_N.db": 2}),
}
# What a server makes for itself while it runs, and keeps.
KEPT = re.compile(
    r"(.*\.(db|jsonl|json|lock|limits|log|pth)|.*\.db-(wal|shm)|batches/running|tmp/.*|.*\.images)", re.ASCII
)


class Wrong(AssertionError):
    """What no fault may lead to."""


class Refused(Exception):
    """A request had an error for an answer that says what is the matter."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(f"{status} {sentence}")
        self.status, self.sentence = status, sentence


Turns = list[tuple[str, str]]  # prompts and completions


class Scenario:
    """A running server, its clients and what they know.

    `flags`: more of app.py; `shell`: see `through` of serving.Server.
    """

    server: Server
    processes: int  # of the server, once it has begun
    before_kill: Callable[[], None] = staticmethod(lambda: None)  # is called just before one is killed

    def __init__(self, folder: Path, *flags: str, engines: int = 1, shell: str = 'exec "$@"') -> None:
        """folder: everything that the server writes lies in it; it is made, with a short path."""
        self.folder, self.engines = folder, engines
        for name in ("tmp", "models"):
            (folder / name).mkdir(parents=True)
        for name in ("pirate.pth", "capitals.pth"):
            shutil.copy(ROOT / "demo" / name, folder / "models")
        self.keys = {
            name: add(
                folder / "keys.json", Key(name, "", 0, 0.0, requests_per_minute=10**6, admin=name == "boss")
            )
            for name in ("anna", "boss")
        }
        self._flags = [
            *("--device", ",".join(["cpu"] * engines), "--frontends", str(engines), "--threads", "1"),
            *("--max-rows", "4", "--l1", "1", "--l2", "1", "--replay-tokens", "24"),
            *("--batch-dir", str(folder / "batches"), "--keys", str(folder / "keys.json")),
            *("--audit-log", str(folder / "audit.jsonl"), "--models", str(folder / "models"), *flags),
        ]
        if "--state-db" not in flags:
            self._flags += ["--state-db", str(folder / "sessions.db")]
        self._shell = f'TMPDIR="{folder / "tmp"}" {shell}'
        self.sessions: dict[str, Turns] = {}  # that have been acknowledged
        self.responses: dict[str, str] = {}  # texts by id
        self.files: dict[str, bytes] = {}  # of requests, by id
        self.doubtful: dict[
            str, tuple[Turns | None, str]
        ] = {}  # what else a session may be, and what was said
        self.unknown: set[str] = set()  # other sessions, which may be anything
        self.generated: set[str] = set()  # ids of requests that were answered whole
        self.asked = 0  # requests that may have been counted
        self._paths = set[str]()  # that were asked for since all that steps have stored was removed
        self._numbers = count(1)
        self._before: dict[str, Counter[str]] = {}

    def __enter__(self) -> "Scenario":
        try:
            self.start()
        except BaseException:  # it is not entered, and its server would stay
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        left = [*self.server.children().values()]
        self.server.stop(signal.SIGKILL)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, left)), SETTLED)

    def start(self) -> None:
        self.server = Server(*self._flags, through=self._shell, wait=False)
        headers = {"Authorization": f"Bearer {self.keys['anna']}", "Connection": "close"}
        self.http = httpx.Client(base_url=self.server.url, timeout=PATIENCE, headers=headers)

        def serves() -> bool:
            assert self.server.process.poll() is None, self.server.log()
            return self.ready

        until(serves, BACK)
        self.processes = len(self.server.children())

    @property
    def whole(self) -> bool:
        """Whether all processes run: one may have died as it began, because a call of its failed."""
        return len(self.server.children()) == self.processes

    def stop(self) -> int:
        self.http.close()
        return self.server.stop()

    def restart(self, kill: bool = False) -> list[str]:
        """Stop the server, or kill its supervisor, and start it again; what is wrong then."""
        self.http.close()
        if kill:
            left = [*self.server.children().values()]
            self.server.process.kill()
            self.server.process.wait()
            until(lambda: not any(map(alive, left)), 90)
            self.server.stop()
            shutil.rmtree(self.folder / "tmp")
            (self.folder / "tmp").mkdir()
        elif code := self.server.stop():
            return [f"the server ended with {code}: {self.server.log()[-2000:]}"]
        self.start()
        self._check_log()
        return self.check_stored(self.sessions)

    # Requests

    def name(self, what: str) -> str:
        """One that has not been used."""
        return f"{what}{next(self._numbers)}"

    def ask(
        self, method: str, path: str, body: object = None, key: str = "anna", **more: Any
    ) -> httpx.Response:
        """A request that is answered as it should be. Raises Refused, and Wrong for any other answer."""
        headers = {"Authorization": f"Bearer {self.keys[key]}"} | more.pop("headers", {})
        with self._answered(path):
            return self._judged(self.http.request(method, path, json=body, headers=headers, **more))

    def stream(
        self, path: str, body: dict[str, Any], ids: dict[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The events of a stream, to its end. Raises as `ask` does, also for an error that ends it."""
        with (
            self._answered(path),
            self.http.stream("POST", path, json=body | {"stream": True}, headers=ids or {}) as reply,
        ):
            if reply.status_code != 200:
                reply.read()
                self._judged(reply)
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Refused(503, _sentence(event))
                    yield event
            raise Wrong(f"the stream of {path} ended without its last event")

    @contextmanager
    def _answered(self, path: str) -> Iterator[None]:
        self.asked += 1
        self._paths.add(path)
        try:
            yield
        except httpx.TimeoutException:
            raise Wrong(f"{path} had no answer within {PATIENCE:.0f} s") from None
        except httpx.TransportError as error:
            raise Wrong(f"{path} had no answer: {error!r}") from None

    def _judged(self, reply: httpx.Response) -> httpx.Response:
        sentence = ""
        with suppress(ValueError):
            sentence = _sentence(reply.json())
        if reply.is_success and not sentence:
            return reply
        if reply.is_success:  # the reply had begun
            raise Refused(503, sentence)
        if reply.status_code in CLEAR and sentence:
            raise Refused(reply.status_code, sentence)
        raise Wrong(
            f"{reply.request.method} {reply.request.url.path}: {reply.status_code} {reply.text[:300]}"
        )

    # Sessions

    def say(self, key: str, text: str, stream: bool = False) -> str:
        """A turn of a session; what the server answers."""
        body = GREEDY | {"contents": [text], "session_id": key}
        before = self.sessions.get(key, [])
        self.doubtful[key] = [*before, (text, "")], ""
        try:
            if stream:
                events = [*self.stream("/state/chat/completions", body)]
                said = "".join(
                    choice["delta"].get("content", "") for event in events for choice in event["choices"]
                )
            else:
                reply = self.ask("POST", "/state/chat/completions", body).json()
                said = reply["choices"][0]["message"]["content"]
        except Refused as refused:
            self.doubtful[key] = [*before, (text, "")], refused.sentence
            raise
        self.sessions[key] = [*before, (text, said)]
        del self.doubtful[key]
        return said

    def change(self, key: str, turns: Turns | None, ask: Callable[[], object]) -> None:
        """What makes a session what `turns` says; None: it is gone then."""
        try:
            ask()
        except Refused as refused:
            self.doubtful[key] = turns, refused.sentence
            raise
        if turns is None:
            self.sessions.pop(key, None)
        else:
            self.sessions[key] = turns

    def history(self, key: str) -> Turns | None:
        """The turns of a session as they are stored; None: there is none."""
        try:
            reply = self.http.get("/v1/state/history", params={"session_id": key})
        except httpx.TransportError as error:
            raise Wrong(f"the history of {key} had no answer: {error!r}") from None
        if reply.status_code == 404:
            return None
        if reply.status_code != 200:
            raise Wrong(f"the history of {key} is {reply.status_code} {reply.text[:300]}")
        return [(turn["prompt"], turn["completion"]) for turn in reply.json()["turns"]]

    # Checks

    @property
    def ready(self) -> bool:
        """Whether all engines serve."""
        with suppress(httpx.TransportError):
            reply = self.http.get("/health/ready")
            each = reply.json().get("engines", {"engine": "ready"})
            return reply.status_code == 200 and set(each.values()) == {"ready"}
        return False

    @property
    def ready_again(self) -> bool:
        """Whether all engines serve, and the front end that is asked knows of all that have died."""
        boss = {"Authorization": f"Bearer {self.keys['boss']}"}
        died = len(re.findall(r" engine\S* died .*; it is started again", self.server.log()))
        with suppress(httpx.TransportError):
            text = self.http.get("/metrics", headers=boss).text  # an error, if a call of it fails
            known = re.findall(r'rwkv:restarts_total\{process="engine"\} (\S+)', text)
            return bool(known) and float(known[0]) >= died and self.ready
        return False

    def run(self, step: Callable[["Scenario"], None]) -> str:
        """Take a step; what a request of it was refused with, if one was. Raises Wrong."""
        try:
            step(self)
        except Refused as refused:
            return str(refused)
        return ""

    def check(self, whole: bool = True) -> list[str]:
        """What is wrong, once nothing fails any more. What steps have stored is deleted.

        whole: also what nothing has been asked for that could have changed it.
        """
        try:
            until(lambda: self.ready, BACK)
        except AssertionError:
            return [f"the server is not ready again: {self.server.log()[-2000:]}"]
        wrong = self.check_stored(self.sessions.keys() | self.doubtful.keys())
        if whole:
            self._check_log()
        try:
            self._tidy_up(whole)
        except (Wrong, AssertionError) as failure:
            wrong.append(str(failure) or repr(failure))
        return wrong + (self.left_behind() if self._before else [])

    def check_stored(self, keys: Iterable[str]) -> list[str]:
        """What is wrong with these sessions, and with responses and files."""
        wrong = []
        for key in keys:
            known, found = self.sessions.get(key), self.history(key)
            if _same(found, known):
                continue
            other, said = self.doubtful.get(key, (known, ""))
            if key in self.unknown or (UNKNOWN in said and _same(found, other)):
                continue
            wrong.append(
                f"{key} is {found} and was acknowledged as {known}; then was said: {said or 'nothing'}"
            )
        for name, text in self.responses.items():
            reply = self.http.get(f"/v1/responses/{name}")
            if reply.status_code != 200 or output_text(reply.json()) != text:
                wrong.append(f"the response {name} is {reply.status_code} {reply.text[:300]}")
        listed = [each["id"] for each in self._listed("/v1/files")] if self.files else []
        for name, data in self.files.items():
            reply = self.http.get(f"/v1/files/{name}/content")
            if name not in listed or reply.content != data:
                wrong.append(f"the file {name} is {reply.status_code} {reply.text[:300]}")
        return wrong

    def _check_log(self) -> None:
        with (self.folder / "audit.jsonl").open("rb") as file:
            verify(file)

    def _tidy_up(self, whole: bool) -> None:
        """Remove all that steps have stored, which what they were refused may have kept them from."""
        boss = {"Authorization": f"Bearer {self.keys['boss']}"}
        for key in {*self.sessions, *self.doubtful, *self.unknown}:
            self._forget(key)
        for name in self.responses:
            self.http.delete(f"/v1/responses/{name}")
        if self._touched(whole, "/v1/batches"):
            for batch in self._listed("/v1/batches"):
                if batch["status"] not in OVER:
                    self.http.post(f"/v1/batches/{batch['id']}/cancel")
            until(lambda: all(batch["status"] in OVER for batch in self._listed("/v1/batches")), PATIENCE)
        if self._touched(whole, "/v1/files"):
            for file in self._listed("/v1/files"):
                self.http.delete(f"/v1/files/{file['id']}")
        if self._touched(whole, "/v1/server/pause"):
            for paused in self.http.get("/v1/server/status").json()["paused_requests"]:
                self.http.post("/v1/server/stop", json={"request_id": paused["request_id"]})
        if self._touched(whole, "/v2/glossaries"):
            # Also those whose terms are gone, as their deletion was refused in the middle.
            for glossary in self.http.get("/v3/glossaries").json()["glossaries"]:
                self.http.delete(f"/v3/glossaries/{glossary['glossary_id']}")
        if self._touched(whole, "/v1/state/upload"):
            for state in self._listed("/v1/state/list"):
                named = {"state_id": state["state_id"]}
                self.http.request("DELETE", "/v1/state/delete", params=named, headers=boss)
        if self._touched(whole, "/v1/adapters"):
            for adapter in self._listed("/v1/adapters"):
                named = {"adapter_id": adapter["adapter_id"]}
                self.http.request("DELETE", "/v1/adapters", json=named, headers=boss)
        self.responses.clear()
        self.files.clear()
        self._paths.clear()

    def _touched(self, whole: bool, path: str) -> bool:
        """Whether requests may have changed what `path` is about since all was removed last."""
        return whole or any(each.startswith(path) for each in self._paths)

    def _listed(self, path: str) -> list[dict[str, Any]]:
        return list(self.http.get(path).json()["data"])

    def _forget(self, key: str) -> None:
        """Delete a session, which may be gone, when nothing fails. Raises Wrong."""
        reply = self.http.post("/state/delete", json={"session_id": key})
        if reply.status_code not in (200, 404):
            raise Wrong(f"{key} cannot be deleted: {reply.status_code} {reply.text[:300]}")
        self.sessions.pop(key, None)
        self.doubtful.pop(key, None)
        self.unknown.discard(key)

    def note(self) -> None:
        """What is open and what is on the disk by now may stay.

        The server is used until all is open that it opens when it is first needed, and nothing more comes.
        """
        found: dict[str, Counter[str]] = {}

        def settled() -> bool:
            before = dict(found)
            with suppress(Refused):
                self._open()
            opened = not self._unopened()  # looked at first: what comes between is of the next look
            found.clear()
            found.update(self._found())
            return opened and found == before

        self._before = {}
        until(settled, 3 * PATIENCE)
        if not (self.folder / "sessions.db").exists():
            # PostgreSQL: what removes states of other servers' sessions connects after ten minutes.
            for name in filter(re.compile("engine").match, found):
                found[name]["socket"] += 1
        self._before = found

    def _open(self) -> None:
        """Have each process open what it opens once, and remove what that has stored."""
        kinds = {role for role, _ in self._unopened()}
        for key in [self.name("opening") for _ in range(2 * self.engines)]:  # which all engines get
            self.say(key, "My name is Ben.")
            self.history(key)
            self._forget(key)
        self._listed("/v1/files")
        if "batches" in kinds:
            self._run_batch()

    def _run_batch(self) -> None:
        """Have a file of one request answered, and remove what that leaves."""
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hello!"}]}
        row = {"custom_id": "0", "method": "POST", "url": "/v1/chat/completions", "body": body}
        form = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", json.dumps(row).encode())}}
        asked = self.ask("POST", "/v1/files", **form).json()["id"]
        batch = {"input_file_id": asked, "endpoint": row["url"], "completion_window": "24h"}
        path = f"/v1/batches/{self.ask('POST', '/v1/batches', batch).json()['id']}"
        until(lambda: self.ask("GET", path).json()["status"] in OVER, PATIENCE)
        for file in (asked, self.ask("GET", path).json()["output_file_id"]):
            self.ask("DELETE", f"/v1/files/{file}")

    def _unopened(self) -> list[tuple[str, str]]:
        """What is to be open in each process of a kind, and is not yet."""
        return [
            (kind, file)
            for name, pid in self.server.children().items()
            for kind, files in OPENED.items()
            if name.startswith(kind)
            for file in files - Counter(map(self._plain, _open_files(pid)))
            if file != "sessions.db" or (self.folder / file).exists()  # it may be PostgreSQL
        ]

    def left_behind(self) -> list[str]:
        """What is open, runs or is on the disk that was not when `note` was called."""
        wrong: list[str] = []

        def settled() -> bool:
            found = self._found()
            wrong[:] = [
                f"{who} has {number} more of {what}"
                for who, its in found.items()
                for what, number in (its - self._before.get(who, Counter())).items()
            ]
            wrong.extend(f"there is no {who} any more" for who in self._before.keys() - found.keys())
            return not wrong

        with suppress(AssertionError):
            until(settled, SETTLED)
        return wrong

    def _found(self) -> dict[str, Counter[str]]:
        """Open files by role of their process, processes, files on the disk, and what engines hold."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name, pid in {"supervisor": self.server.process.pid, **self.server.children()}.items():
            role = REFILLED.sub("", name) if name.startswith(("frontend", "batches")) else name
            with suppress(FileNotFoundError, ProcessLookupError):
                found[role] += Counter(map(self._plain, _open_files(pid)))
        found["the server"] = Counter({"processes": len(_children(self.server.process.pid))})
        found["the engine"] = self._counted()
        found["the database"] = self.rows()
        names = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        found["the disk"] = Counter(name for name in names if not KEPT.fullmatch(name))
        temporary = (self.folder / "tmp").rglob("*")
        found["the disk"]["of temporary files"] = sum(1 for path in temporary if path.parent.name != "counts")
        return dict(found)

    def _counted(self) -> Counter[str]:
        """What the server says that it holds."""
        boss = {"Authorization": f"Bearer {self.keys['boss']}"}
        stats = self.http.get("/stats", headers=boss).json()
        held = Counter({"requests that wait": stats["dynamic_batching"]["pending_requests"]})
        for model in stats["models"]:
            held.update({"rows": model["running"], "rows that wait": model["waiting"]})
            held.update({f"sessions in {tier}": number for tier, number in model["sessions"].items()})
        return held

    def uploads(self) -> set[Path]:
        """Files that front ends have written for an engine to read."""
        return {*(self.folder / "tmp").glob("*/upload-*")}

    def rows(self) -> Counter[str]:
        """Rows of the SQLite file of sessions: no text of one that is deleted may stay."""
        file = self.folder / "sessions.db"
        if not file.exists():
            return Counter()
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=PATIENCE)) as database:
            return Counter(
                {
                    f"rows of {table}": database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                    for table in ("turns", "sessions", "images", "documents")
                }
            )

    def _plain(self, target: str) -> str:
        """What is open, without what differs each time."""
        if target.startswith(str(self.folder)):
            name = re.sub(r"^tmp/rwkv-[^/]+", "tmp/rwkv-N", os.path.relpath(target, self.folder))
            return re.sub(r"\d+|[0-9a-f]{16,}", "N", name)
        return target.partition(":")[0] if ":[" in target else target


def _sentence(body: Any) -> str:
    body = body if isinstance(body, dict) else {}
    error = body.get("error") or (body.get("message", "") if len(body) == 1 else "")
    return str(error.get("message", "") if isinstance(error, dict) else error)


def _same(found: Turns | None, turns: Turns | None) -> bool:
    """An empty completion stands for any."""
    if found is None or turns is None:
        return found is turns
    return len(found) == len(turns) and all(
        text in prompt and wanted in ("", said)
        for (prompt, said), (text, wanted) in zip(found, turns, strict=True)
    )


def output_text(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content") or [])


def _open_files(pid: int) -> list[str]:
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(file))
    return found


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def new_folder() -> Path:
    """With a path that is short enough for sockets."""
    return Path(tempfile.mkdtemp(prefix="rwkv-faults-", dir="/tmp"))
