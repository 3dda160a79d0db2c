"""What clients do with the server of fault_scenario.py, in steps.

Each has names of its own, asks for what touches the disk, and raises Wrong for an answer that no fault
excuses. `Scenario.check` looks at what it has left.
"""

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from fault_scenario import BACK, GREEDY, PATIENCE, SETTLED, Refused, Scenario, Wrong, output_text
from serving import ROOT, alive, until

from rwkv_batch.state.entries import UNKNOWN

EXACT = {"temperature": 0, "max_tokens": 4}
ENDLESS = GREEDY | {"max_tokens": 400, "chunk_size": 1}
MANY = 20  # uploads, of which one is cut
LONG = "The dog sees the house and the cat sees the dog. " * 3  # more tokens than are replayed

Step = Callable[[Scenario], None]


def chat(place: Scenario) -> None:
    """Noted in the audit log and in the usage of the key."""
    body = EXACT | {"messages": [{"role": "user", "content": "What is 7 + 5?"}]}
    reply = place.ask("POST", "/v1/chat/completions", body)
    assert reply.json()["choices"][0]["message"]["content"], reply.text
    place.generated.add(reply.headers["x-request-id"])
    _audited(place, reply.headers["x-request-id"])


def streamed(place: Scenario) -> None:
    """Noted as `chat` is."""
    name = place.name("streamed-")
    body = EXACT | {"messages": [{"role": "user", "content": "What is 7 + 5?"}]}
    assert [*place.stream("/v1/chat/completions", body, {"X-Request-Id": name})]
    place.generated.add(name)
    _audited(place, name)


def _audited(place: Scenario, name: str) -> None:
    """Wait until a request is in the audit log, among its last lines."""

    def found() -> bool:
        with (place.folder / "audit.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return name.encode() in file.read()

    until(found, SETTLED)


def usage(place: Scenario) -> None:
    chat(place)
    total: dict[str, int] = {}

    def counted() -> bool:  # by another front end soon
        total.update(place.ask("GET", "/v1/usage").json()["total"])
        return total["requests"] >= len(place.generated)

    try:
        until(counted, SETTLED)
    except AssertionError:
        raise Wrong(f"{total} was counted of {len(place.generated)} requests that were answered") from None
    if total["requests"] > place.asked:
        raise Wrong(f"{total} was counted of {place.asked} requests")


def turns(place: Scenario) -> None:
    key = place.name("turns")
    place.say(key, "My name is Ben.")
    place.say(key, "What is my name?", stream=True)


def fork(place: Scenario) -> None:
    """Fork a session; the copy goes on by itself."""
    key, copy = place.name("origin"), place.name("copy")
    place.say(key, "My name is Ben.")
    body = {"session_id": key, "new_session_id": copy}
    place.change(copy, place.sessions[key], lambda: place.ask("POST", "/v1/state/fork", body))
    place.say(copy, "What is my name?")


def rewind(place: Scenario) -> None:
    key = place.name("rewound")
    place.say(key, "My name is Ben.")
    place.say(key, "My name is Eve.")
    body = {"session_id": key, "turn": 1}
    place.change(key, place.sessions[key][:1], lambda: place.ask("POST", "/v1/state/rewind", body))
    place.say(key, "What is my name?")


def delete(place: Scenario) -> None:
    key = place.name("deleted")
    place.say(key, "My name is Ben.")
    place.change(key, None, lambda: place.ask("POST", "/state/delete", {"session_id": key}))


def dropped(place: Scenario) -> None:
    """A session is deleted while a turn of it runs, which keeps what it goes on from until it ends."""
    key, before = place.name("dropped"), place.rows()
    place.say(key, "My name is Ben.")
    body = GREEDY | {"contents": ["Tell me a story."], "session_id": key, "max_tokens": 12, "chunk_size": 1}
    events = place.stream("/state/chat/completions", body)
    next(events)
    place.unknown.add(key)  # until it is known to be gone
    place.change(key, None, lambda: place.ask("POST", "/state/delete", {"session_id": key}))
    with suppress(Refused):
        for _ in events:
            pass
    until(lambda: place.rows() <= before, SETTLED)


def export(place: Scenario) -> None:
    """To a file, which is imported under another name."""
    key, copy = place.name("exported"), place.name("imported")
    place.say(key, "My name is Ben.")
    data = place.ask("GET", "/v1/state/export", params={"session_id": key}).content
    put = {"params": {"session_id": copy}, "content": data}
    place.change(copy, place.sessions[key], lambda: place.ask("POST", "/v1/state/import", **put))
    place.say(copy, "What is my name?")


def images(place: Scenario) -> None:
    """Long sessions in turns, more than memory holds: their states are written to files and read again.

    Of one nothing is known but the state.
    """
    keys = [place.name("long") for _ in range(place.engines + 2)]
    place.say(keys[0], LONG)
    data = place.ask("GET", "/v1/state/export", params={"session_id": keys[0], "what": "state"}).content
    put = {"params": {"session_id": keys[0]}, "content": data}
    place.change(keys[0], [], partial(place.ask, "POST", "/v1/state/import", **put))
    for text in (LONG, "What does the dog see?"):
        for key in keys:
            place.say(key, text)
    for key in keys:
        place.change(key, None, partial(place.ask, "POST", "/state/delete", {"session_id": key}))


def pause(place: Scenario) -> None:
    name, key = place.name("paused-"), place.name("teller")
    place.doubtful[key] = [("Tell", "")], UNKNOWN  # a turn that is paused is stored when it has ended
    body = GREEDY | {"contents": ["Tell me a story."], "session_id": key, "max_tokens": 40, "chunk_size": 1}
    events = place.stream("/state/chat/completions", body, {"X-Request-Id": name})
    next(events)
    paused = place.ask("POST", "/v1/server/pause", {"request_id": name}).json()["paused"]
    rest = [*events]
    if paused and rest[-1]["choices"][0].get("finish_reason") == "paused":
        place.ask("POST", "/v1/server/resume", {"request_id": name, "stream": False})
    (turn,) = place.history(key) or [("", "")]
    place.sessions[key] = [turn]
    if not turn[1]:
        raise Wrong("a request that was resumed has not been stored")


def responses(place: Scenario) -> None:
    previous: dict[str, str] = {}
    for text in ("My name is Ben.", "What is my name?"):
        body = {"input": text, "temperature": 0, "max_output_tokens": 16} | previous
        reply = place.ask("POST", "/v1/responses", body).json()
        place.responses[reply["id"]] = output_text(reply)
        previous = {"previous_response_id": reply["id"]}
    assert output_text(place.ask("GET", f"/v1/responses/{reply['id']}").json()) == output_text(reply)
    first = next(iter(place.responses))
    text = place.responses.pop(first)
    try:
        place.ask("DELETE", f"/v1/responses/{first}")
    except Refused as refused:
        if UNKNOWN not in refused.sentence:
            place.responses[first] = text
        raise


def files(place: Scenario) -> None:
    name, data = _uploaded(place)
    listed = place.ask("GET", "/v1/files").json()["data"]
    assert name in [each["id"] for each in listed]
    _removed(place, name, data)


def batch(place: Scenario) -> None:
    """A file of requests, each of which is answered once."""
    name, data = _uploaded(place)
    body = {"input_file_id": name, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = place.ask("POST", "/v1/batches", body).json()["id"]

    over: dict[str, Any] = {}

    def ended() -> bool:
        with suppress(Refused):
            over.update(place.ask("GET", f"/v1/batches/{made}").json())
        return over.get("status") in ("completed", "failed")

    until(ended, PATIENCE)
    if over["status"] != "completed" or over["request_counts"]["completed"] != 2:
        raise Wrong(f"a batch is {over}")
    output = over["output_file_id"]
    answers = place.ask("GET", f"/v1/files/{output}/content").text.splitlines()
    if sorted(json.loads(line)["custom_id"] for line in answers) != ["row 0", "row 1"]:
        raise Wrong(f"the answers of a batch are {answers}")
    for each, contents in ((output, None), (name, data)):
        _removed(place, each, contents)


def _uploaded(place: Scenario) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": "What is 7 + 5?"}]
    row = {"method": "POST", "url": "/v1/chat/completions", "body": EXACT | {"messages": messages}}
    data = "\n".join(json.dumps({"custom_id": f"row {number}"} | row) for number in range(2)).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", data)}}
    name = place.ask("POST", "/v1/files", **form).json()["id"]
    place.files[name] = data
    return name, data


def _removed(place: Scenario, name: str, data: bytes | None) -> None:
    found = place.ask("GET", f"/v1/files/{name}/content").content
    if data is not None and found != data:
        raise Wrong(f"the file {name} is {found[:300]!r}")
    place.files.pop(name, None)
    place.ask("DELETE", f"/v1/files/{name}")


def start_state(place: Scenario) -> None:
    name = place.name("pirate")
    data = (ROOT / "demo" / "pirate.pth").read_bytes()
    form = {"data": {"state_id": name}, "files": {"file": ("pirate.pth", data)}}
    place.ask("POST", "/v1/state/upload", key="boss", **form)
    chat = EXACT | {"model": f"rwkv7-demo {name}", "messages": [{"role": "user", "content": "Hello!"}]}
    place.ask("POST", "/v1/chat/completions", chat)
    place.ask("DELETE", "/v1/state/delete", key="boss", params={"state_id": name})


def adapter(place: Scenario) -> None:
    name = place.name("capitals")
    load = {"adapter_id": name, "path": "capitals.pth", "adapter_alpha": 16}
    place.ask("POST", "/v1/adapters", load, key="boss")
    chat = EXACT | {"adapter": name, "messages": [{"role": "user", "content": "Hello!"}]}
    place.ask("POST", "/v1/chat/completions", chat)
    place.ask("DELETE", "/v1/adapters", {"adapter_id": name}, key="boss")


def glossary(place: Scenario) -> None:
    body = {"name": "ours", "source_lang": "en", "target_lang": "de", "entries_format": "tsv"}
    made = place.ask("POST", "/v2/glossaries", body | {"entries": "dog\tRüde"}).json()["glossary_id"]
    entries = place.ask("GET", f"/v2/glossaries/{made}/entries").text
    assert "Rüde" in entries
    place.ask("DELETE", f"/v2/glossaries/{made}")


def metrics(place: Scenario) -> None:
    for path in ("/metrics", "/stats", "/health", "/v1/server/status"):
        place.ask("GET", path, key="boss")
    place.ask("POST", "/state/status", {})


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        chat,
        streamed,
        usage,
        turns,
        fork,
        rewind,
        delete,
        dropped,
        export,
        images,
        pause,
        responses,
        files,
        batch,
        start_state,
        adapter,
        glossary,
        metrics,
    )
}


def _killed(role: str, use: Step) -> Step:
    def step(place: Scenario) -> None:
        """A process of that role is killed, and another one does its work soon, which `use` needs."""
        until(lambda: place.whole, BACK)
        found = place.server.children()
        name = next((name for name in found if name.startswith(role)), None)
        if name is None:  # one engine has no process that writes for it
            return
        place.before_kill()
        os.kill(found[name], signal.SIGKILL)
        until(lambda: not alive(found[name]), SETTLED)
        until(lambda: place.whole, BACK)
        until(lambda: place.ready_again, BACK)
        use(place)

    return step


def engine_killed_in_use(place: Scenario) -> None:
    """While it streams a turn and a chat, and others ask on until it serves again: all are answered."""
    key = place.name("cut")
    place.say(key, "My name is Ben.")
    asked = "Tell me a story."
    chat_body = ENDLESS | {"messages": [{"role": "user", "content": asked}]}
    under_way = [
        place.stream("/state/chat/completions", ENDLESS | {"contents": [asked], "session_id": key}),
        place.stream("/v1/chat/completions", chat_body),
    ]
    for events in under_way:
        next(events)
    name, pid = next(found for found in place.server.children().items() if found[0].startswith("engine"))
    place.before_kill()
    os.kill(pid, signal.SIGKILL)
    for events in under_way:
        with suppress(Refused):
            for _ in events:
                pass

    def back() -> bool:
        with suppress(Refused):  # while it is not there
            chat(place)
        return place.server.children().get(name, pid) != pid and place.ready_again

    until(back, BACK)  # its first process may end too
    # The turn may just have been committed.
    place.doubtful[key] = [*place.sessions[key], (asked, "")], UNKNOWN
    turns(place)


def front_end_killed_in_upload(place: Scenario) -> None:
    """What it has written for an engine to read does not stay."""
    until(lambda: place.whole, BACK)
    before = place.uploads()
    place.before_kill()
    for _ in range(MANY):
        if pid := _killed_in_upload(place, before):
            until(lambda pid=pid: not alive(pid), SETTLED)
            break
    until(lambda: place.uploads() == before, BACK)
    until(lambda: place.whole, BACK)
    until(lambda: place.ready_again, BACK)
    start_state(place)


def _killed_in_upload(place: Scenario, before: set[Path]) -> int | None:
    """The front end that was killed while a file of its was there; None: the upload was over before."""
    form = {"data": {"state_id": place.name("cut")}, "files": {"file": ("cut.pth", bytes(64 << 20))}}
    headers = {"Authorization": f"Bearer {place.keys['boss']}"}

    def upload() -> None:
        with suppress(httpx.TransportError):  # no state is in these bytes, and the connection may be cut
            httpx.post(place.server.url + "/v1/state/upload", headers=headers, timeout=PATIENCE, **form)

    asking = Thread(target=upload)
    asking.start()
    found = set[Path]()
    while asking.is_alive() and not found:
        found = place.uploads() - before
    pid = int(found.pop().name.split("-")[1]) if found else None
    if pid:
        os.kill(pid, signal.SIGKILL)
    asking.join()
    return pid


# Steps that take seconds: processes that begin, over what is on the disk.
RESTARTS = {
    "front end restarted": _killed("frontend", chat),
    "front end killed in an upload": front_end_killed_in_upload,
    "batches restarted": _killed("batches", batch),
    "database restarted": _killed("sessions.db", turns),
    "engine restarted": _killed("engine", turns),
    "engine killed in use": engine_killed_in_use,
}
