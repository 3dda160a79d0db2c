"""Files and batches with the official OpenAI SDK against the real server."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from serving import ROOT, Server, until

from rwkv_batch.keys.records import Key, add

QUESTION = "What is the capital of {}?"
EXACT = {"temperature": 0, "presence_penalty": 0, "max_tokens": 20}
CHAT = "/v1/chat/completions"
SECRETS: list[str] = []  # of two keys


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batches")
    limits = {"anna": None, "ben": 100}
    SECRETS.extend(
        add(folder / "keys.json", Key(n, "", 0, 0.0, batch_bytes=most)) for n, most in limits.items()
    )
    flags = ("--max-rows", "2", "--frontends", "1", "--batch-dir", str(folder / "batches"), "--password", "W")
    running = Server("--device", "cpu", *flags, "--keys", str(folder / "keys.json"))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="module", params=["/v1", "/openai/v1"])
def client(batching: Server, request: pytest.FixtureRequest) -> OpenAI:
    return OpenAI(
        base_url=batching.url + request.param, api_key="W", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def one(batching: Server) -> OpenAI:
    return OpenAI(base_url=batching.url + "/v1", api_key="W", max_retries=0)


def lines(bodies: list[dict], url: str = CHAT) -> bytes:
    rows = [
        {"custom_id": f"row {i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, rows)).encode()


def chat(country: str, **fields) -> dict:
    return (
        {"model": "rwkv7", "messages": [{"role": "user", "content": QUESTION.format(country)}]}
        | EXACT
        | fields
    )


def run(client: OpenAI, data: bytes, url: str = CHAT, **fields) -> openai.types.Batch:
    """A batch of these lines, once it is over."""
    file = client.files.create(file=("rows.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **fields)
    return over(client, batch.id)


def over(client: OpenAI, name: str) -> openai.types.Batch:
    ends = ("completed", "failed", "cancelled", "expired")
    until(lambda: client.batches.retrieve(name).status in ends, 180)
    return client.batches.retrieve(name)


def read(client: OpenAI, name: str | None) -> dict[str, dict]:
    """What a file of answers or errors says of each row."""
    assert name
    found = [json.loads(line) for line in client.files.content(name).text.splitlines()]
    return {each["custom_id"]: each for each in found}


def test_a_file_of_requests_is_answered(client: OpenAI):
    """Rows that are wrong are in the file of errors; the others are answered as they are without a batch."""
    bodies = [chat("France"), chat("Japan"), chat("Italy", temperature=9), chat("France", stream=True)]
    batch = run(client, lines(bodies), metadata={"night": "1"})
    assert batch.status == "completed" and batch.metadata == {"night": "1"}
    assert batch.request_counts and batch.request_counts.model_dump() == {
        "total": 4,
        "completed": 2,
        "failed": 2,
    }
    answers, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert set(answers) == {"row 0", "row 1"} and set(errors) == {"row 2", "row 3"}
    for name, body in (("row 0", bodies[0]), ("row 1", bodies[1])):
        response = answers[name]["response"]
        assert response["status_code"] == 200 and answers[name]["error"] is None
        direct = client.chat.completions.create(**body)
        assert response["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
        assert response["body"]["usage"]["total_tokens"] == direct.usage.total_tokens
    assert "temperature" in errors["row 2"]["response"]["body"]["error"]["message"]
    assert "stream" in errors["row 3"]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "User: What is 7 + 5?\n\nAssistant:"} | EXACT, "12"),
        ("/v1/responses", {"input": QUESTION.format("France"), "temperature": 0}, "Paris"),
        ("/v2/translate", {"text": ["The dog sees the house."], "target_lang": "DE"}, "Hund"),
    ],
)
def test_other_routes_run_too(one: OpenAI, url: str, body: dict, expected: str):
    batch = run(one, lines([body], url), url)
    answers = read(one, batch.output_file_id)
    assert expected in json.dumps(answers["row 0"]["response"]["body"])


def test_files_are_listed_and_deleted(client: OpenAI):
    data = lines([chat("France")])
    file = client.files.create(
        file=("a b.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.purpose) == (len(data), "a b.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    assert file.id in [each.id for each in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_batches_are_listed_in_pages(one: OpenAI):
    made = [run(one, lines([chat("France", max_tokens=1)])).id for _ in range(3)]
    first = one.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:0:-1] and first.has_next_page()
    assert made[0] in [batch.id for batch in first.get_next_page().data]


def test_lines_that_are_no_requests_fail_the_batch(one: OpenAI):
    data = lines([chat("France"), chat("Japan")], "/v1/completions") + b"\nnonsense\n"
    batch = run(one, data)
    assert batch.status == "failed" and batch.errors and batch.errors.data
    assert [(error.code, error.line) for error in batch.errors.data] == [
        ("mismatched_endpoint", 1),
        ("mismatched_endpoint", 2),
        ("invalid_json_line", 3),
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(one: OpenAI, fields: dict, named: str):
    file = one.files.create(file=("rows.jsonl", lines([chat("France")])), purpose="batch")
    wanted = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        one.batches.create(**wanted)
    assert refused.value.param.startswith(named)
    assert "pattern" not in refused.value.message


def test_other_purposes_and_passwords_are_refused(batching: Server, one: OpenAI):
    with pytest.raises(openai.BadRequestError, match="purpose"):
        one.files.create(file=("rows.jsonl", b"{}"), purpose="assistants")
    for path in ("/v1/files", "/v1/batches", "/v1/files/file-x/content"):
        assert httpx.get(batching.url + path, timeout=60).status_code == 401


def test_batches_and_usage_belong_to_the_key_that_made_them(batching: Server, one: OpenAI):
    anna, ben = (OpenAI(base_url=batching.url + "/v1", api_key=key, max_retries=0) for key in SECRETS)
    batch = run(anna, lines([chat("France")]))
    answers = read(anna, batch.output_file_id)
    assert [each.id for each in anna.batches.list().data] == [batch.id]
    assert not ben.batches.list().data and not ben.files.list().data
    for forbidden in (
        lambda: ben.batches.retrieve(batch.id),
        lambda: ben.files.content(batch.output_file_id),
        lambda: ben.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            forbidden()
    assert batch.id in [each.id for each in one.batches.list().data], "the password sees all"
    with pytest.raises(openai.APIStatusError, match="of this key together have 100 at most") as refused:
        ben.files.create(file=("rows.jsonl", b"x" * 101), purpose="batch")
    assert refused.value.status_code == 413
    tokens = answers["row 0"]["response"]["body"]["usage"]["completion_tokens"]

    def used() -> int:
        reply = httpx.get(
            batching.url + "/v1/usage", headers={"Authorization": f"Bearer {SECRETS[0]}"}, timeout=60
        ).json()
        return sum(each["completion_tokens"] for each in reply["data"])

    until(lambda: used() == tokens)


def test_a_batch_gives_way_is_cancelled_and_keeps_what_is_done(one: OpenAI):
    endless = chat("France", max_tokens=100_000, stop_tokens=[], ignore_eos=True)
    data = lines([chat("France"), *[endless] * 4])
    file = one.files.create(file=("rows.jsonl", data), purpose="batch")
    batch = one.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    until(lambda: one.batches.retrieve(batch.id).request_counts.completed == 1)
    direct = one.chat.completions.create(**chat("Japan"))
    assert "Tokyo" in direct.choices[0].message.content, "though its rows have all slots"
    with pytest.raises(openai.ConflictError):
        one.files.delete(file.id)
    assert one.batches.cancel(batch.id).status == "cancelling"
    ended = over(one, batch.id)
    assert ended.status == "cancelled" and ended.cancelled_at
    assert list(read(one, ended.output_file_id)) == ["row 0"]
    with pytest.raises(openai.ConflictError):
        one.batches.cancel(run(one, lines([chat("France")])).id)


def test_processes_that_are_killed_lose_no_row(batching: Server, one: OpenAI):
    """Neither that which runs batches nor the engine."""
    slow = chat("France", max_tokens=100, stop_tokens=[], ignore_eos=True)
    file = one.files.create(file=("rows.jsonl", lines([chat("France")] * 3 + [slow] * 4)), purpose="batch")
    batch = one.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until(lambda: one.batches.retrieve(batch.id).request_counts.completed >= 3)
    for kind in ("batches", "engine"):
        (name,) = [name for name in batching.children() if name.startswith(kind)]
        os.kill(batching.children()[name], signal.SIGKILL)
    ended = over(one, batch.id)
    assert ended.status == "completed" and ended.request_counts.completed == 7
    assert len(read(one, ended.output_file_id)) == 7


def test_a_file_runs_without_a_server_and_keeps_what_is_done(tmp_path: Path):
    """Behind the answers of a run before, of which the last line is cut."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([chat("Japan"), chat("France"), chat("Italy", temperature=9)]))
    before = {"id": "batch_req_1", "custom_id": "row 0", "response": {"body": "of before"}, "error": None}
    output.write_text(f'{json.dumps(before)}\n{{"id":"batch_req_2","custom_id": "row 1", "resp')
    command = [sys.executable, "-m", "rwkv_batch.batch", str(source), str(output), "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and "2 of 3 rows are answered" in done.stderr, done.stderr
    first, second = (json.loads(line) for line in output.read_text().splitlines())
    assert first == before and "Paris" in json.dumps(second["response"]["body"])
    (error,) = Path(f"{output}.errors").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "row 2"


def test_a_file_that_another_run_writes_is_left_alone(tmp_path: Path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines([chat("Japan")]))
    command = [sys.executable, "-m", "rwkv_batch.batch", str(source), str(output), "--device", "cpu"]
    with open(output, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert refused.returncode == 2 and f"{output} is being written by another run; wait" in refused.stderr
    assert {*tmp_path.iterdir()} == {source, output} and not output.read_bytes()
