"""The load generator against a small server that sends exactly what a test gives it."""

import asyncio
import json
import os
import pty
import random
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyrwkv_tokenizer
import pytest
from fake_api import FakeServer, chat, event, open_stream, respond, send, stream, usage
from load_run import LoadRun

from bench.report import Answer
from bench.serve import main

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
DONE = "data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def bench(server: FakeServer, tmp_path: Path, capsys) -> LoadRun:
    file = tmp_path / "out.jsonl"
    return LoadRun(
        main,
        ["--url", f"http://127.0.0.1:{server.port}", "--warmup", "0", "--json", str(file)],
        file,
        capsys,
    )


def test_counts_come_from_usage_and_not_from_the_number_asked_for(server, bench):
    both = asyncio.Event()

    async def answer(writer, body):
        if server.running == 2:
            both.set()
        await both.wait()
        await stream(
            writer,
            chat("", finish=None),
            chat("ab"),
            chat("cdefgh"),
            chat("", finish="stop"),
            usage(7, 5),
            DONE,
        )

    server.answer = answer
    figures = bench("--requests", "6", "--concurrency", "2", "--output-tokens", "99")
    assert (figures["succeeded"], figures["failed"], figures["unfinished"]) == (6, 0, 0)
    assert (figures["input_tokens"], figures["output_tokens"]) == (42, 30)
    assert (figures["input_tokens_from"], figures["output_tokens_from"]) == ({"usage": 6}, {"usage": 6})
    assert (figures["text_events"], figures["tokens_per_event"]) == (12, 2.5)
    assert (figures["finish_reasons"], figures["usage_disagrees"]) == ({"stop": 6}, 0)
    assert 30 / figures["output_tokens_per_s"] == pytest.approx(
        figures["duration_s"], abs=1e-4
    )  # it is rounded to that
    assert (figures["model"], figures["concurrency"]) == ("fake-model", 2)
    assert server.most_running == 2 and len(server.bodies) == 6
    assert server.bodies[0]["max_tokens"] == 99 and server.bodies[0]["stream_options"] == {
        "include_usage": True
    }
    assert "30 (5.0 a row; counted from usage)" in bench.out


def test_events_cut_anywhere_lose_nothing(server, bench):
    text = "你好, 世界 é ✿ 🙂"

    async def answer(writer, body):
        body_bytes = (
            ": heartbeat\r\n\r\n"
            + "".join(chat(c) for c in text)
            + usage(2, len(text)).replace("\n", "\r\n")
            + DONE
        ).encode()
        cuts = sorted(random.Random(len(server.bodies)).sample(range(1, len(body_bytes)), 30))
        wire = b"".join(
            f"{len(p):X};note=1\r\n".encode() + p + b"\r\n"
            for p in (body_bytes[a:b] for a, b in zip([0, *cuts], [*cuts, len(body_bytes)], strict=True))
        )
        head = (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"
            b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        whole = head + wire + b"0\r\nTrailer: x\r\n\r\n"
        for start in range(0, len(whole), 97):
            writer.write(whole[start : start + 97])
            await writer.drain()
            await asyncio.sleep(0)

    server.answer = answer
    figures = bench("--requests", "8", "--concurrency", "4", "--output-tokens", "99")
    assert (figures["succeeded"], figures["text_events"], figures["output_tokens"]) == (
        8,
        8 * len(text),
        8 * len(text),
    )
    assert figures["output_tokens_reencoded"] == 8 * len(pyrwkv_tokenizer.RWKVTokenizer().encode(text))


def test_events_that_come_in_one_read_have_come_at_one_moment(server, bench, monkeypatch):
    """The others are sent when the first one has been read."""
    read, feed = threading.Event(), Answer.feed_events

    def fed(answer: Answer, data: bytes, moment: float) -> int:
        count = feed(answer, data, moment)
        if count:
            read.set()
        return count

    monkeypatch.setattr(Answer, "feed_events", fed)

    async def answer(writer, body):
        open_stream(writer)
        await send(writer, chat("a"))
        assert await asyncio.to_thread(read.wait, 60)
        rest = [chat("b"), chat("c"), chat("d"), usage(1, 4), DONE]
        writer.write(b"".join(f"{len(text):x}\r\n{text}\r\n".encode() for text in rest) + b"0\r\n\r\n")

    server.answer = answer
    figures = bench("--requests", "1", "--output-tokens", "9")
    gap, token = figures["event_gap_ms"], figures["itl_ms"]
    assert (figures["text_events"], gap["mean"], token["mean"]) == (4, gap["p99"], token["p99"])
    assert gap["mean"] == pytest.approx(3 * token["mean"], abs=1e-3)


def test_each_way_to_fail_is_counted_by_its_reason(server, bench):
    async def answer(writer, body):
        match len(server.bodies):
            case 1:
                respond(writer, 429, b'{"error": {"message": "Too many requests wait; try again later."}}')
            case 2:
                respond(writer, 400, b'{"error": "Empty prompts list"}')
            case 3:
                open_stream(writer)
                await send(writer, chat("a"), usage(1, 1000))
            case 4:
                await stream(writer, chat("a"))
            case 5:
                await stream(writer, chat("a"), event(error="the engine stopped"), DONE)
            case 6:
                await stream(writer, "data: {nonsense\n\n", DONE)
            case 7:
                pass
            case 8:
                writer.write(b"hello there\r\n\r\n")
            case _:
                await stream(writer, chat("abc", finish="stop"), usage(4, 2), DONE)

    server.answer = answer
    figures = bench("--requests", "9", code=1)
    assert figures["failures"] == dict.fromkeys(
        (
            "HTTP 429: Too many requests wait; try again later.",
            "HTTP 400: Empty prompts list",
            "peer closed connection without sending complete message body (incomplete chunked read)",
            "the stream ended without [DONE]",
            "error in an event: the engine stopped",
            "an event is not the JSON of an OpenAI-compatible reply",
            "server disconnected without sending a response",
            "the reply begins with 'hello there'",
        ),
        1,
    )
    assert (figures["succeeded"], figures["failed"], figures["output_tokens"], figures["input_tokens"]) == (
        1,
        8,
        2,
        4,
    )
    assert "1 x HTTP 400: Empty prompts list" in bench.out


def test_an_answer_that_is_not_complete_in_time_has_failed(server, bench):
    async def answer(writer, body):
        open_stream(writer)
        await asyncio.Event().wait()

    server.answer = answer
    figures = bench("--requests", "1", "--timeout", "0.5", code=1)
    assert figures["failures"] == {"no complete answer within 0.5 s": 1}
    assert (figures["succeeded"], figures["failed"]) == (0, 1)


@pytest.mark.parametrize("api", ["batch", "big_batch"])
def test_native_batch_counts_every_row(server, bench, api):
    hello = "Hello world, how are you?"

    async def answer(writer, body):
        assert len(body["contents"]) == 3 and body["stop_tokens"] == [] and "ignore_eos" not in body
        await stream(
            writer,
            event(
                choices=[{"index": 0, "delta": {"content": "ab"}}, {"index": 2, "delta": {"content": hello}}]
            ),
            event(choices=[{"index": 0, "delta": {"content": "cd"}}]),
            event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]),
            event(choices=[{"index": i, "delta": {}, "finish_reason": "stop"} for i in (1, 2)]),
            DONE,
        )

    server.answer = answer
    figures = bench(
        "--requests", "2", "--api", api, "--batch", "3", "--input-tokens", "10", "--output-tokens", "9"
    )
    words = len(pyrwkv_tokenizer.RWKVTokenizer().encode(hello))
    assert figures["output_tokens"] == 2 * (9 + 0 + words)
    assert figures["output_tokens_from"] == {"finish reason and text": 2}
    assert (figures["input_tokens"], figures["input_tokens_from"]) == (60, {"prompt text": 2})
    assert (figures["text_events"], figures["finish_reasons"]) == (6, {"length": 2, "stop": 4})
    assert len({text for body in server.bodies for text in body["contents"]}) == 6


def test_replies_that_are_not_streamed(server, bench):
    async def answer(writer, body):
        assert body["stream"] is False and "stream_options" not in body
        reply = {
            "choices": [{"index": 0, "text": "one two", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 4},
        }
        respond(writer, 200, b"\n\n" + json.dumps(reply).encode())

    server.answer = answer
    figures = bench("--requests", "3", "--no-stream", "--api", "completions", "--output-tokens", "4")
    assert (figures["input_tokens"], figures["output_tokens"], figures["usage_disagrees"]) == (33, 12, 0)
    assert figures["ttft_ms"] is None and figures["itl_ms"] is None and figures["e2e_ms"]["mean"] > 0
    assert server.heads[0].startswith("POST /v1/completions ")


def test_a_usage_that_cannot_be_true_is_pointed_out(server, bench):
    async def answer(writer, body):
        completion = (1, 2, 9, 5)[len(server.bodies) - 1]  # two events, max_tokens 5
        await stream(
            writer,
            chat("a"),
            chat("b", finish="length" if completion in (2, 5) else "stop"),
            usage(1, completion),
            DONE,
        )

    server.answer = answer
    figures = bench("--requests", "4", "--output-tokens", "5")
    assert figures["usage_disagrees"] == 3 and figures["output_tokens"] == 17
    assert "3 answers whose usage does not fit" in bench.out


def test_several_processes_share_the_requests(server, bench):
    async def answer(writer, body):
        await stream(writer, chat("abc", finish="length"), usage(len(server.bodies), 4), DONE)

    server.answer = answer
    figures = bench("--requests", "21", "--concurrency", "5", "--processes", "2")
    assert (figures["succeeded"], figures["output_tokens"]) == (21, 84)
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 21
    assert server.most_running <= 5


def test_poisson_arrivals_do_not_wait_for_answers(server, bench):
    together = asyncio.Event()

    async def answer(writer, body):
        if len(server.bodies) == 12:
            together.set()
        await together.wait()  # nobody is answered before the last request has come
        await stream(writer, chat("a", finish="stop"), usage(1, 1), DONE)

    server.answer = answer
    figures = bench("--requests", "12", "--rate", "inf")
    assert (figures["succeeded"], figures["rate"]) == (12, "inf") and "concurrency" not in figures


def test_the_seed_fixes_prompts_of_an_exact_length(server, bench):
    async def answer(writer, body):
        await stream(writer, chat("a", finish="stop"), usage(1, 1), DONE)

    server.answer = answer
    for seed in ("1", "1", "2"):
        bench("--requests", "2", "--api", "completions", "--input-tokens", "50", "--seed", seed)
    first, again, other = ([b["prompt"] for b in server.bodies[i : i + 2]] for i in (0, 2, 4))
    assert first == again and not set(first) & set(other) and first[0] != first[1]
    tokenizer = pyrwkv_tokenizer.RWKVTokenizer()
    assert {len(tokenizer.encode(p)) for p in first + other} == {50}


def test_prompts_from_files_and_more_fields(server, bench, tmp_path):
    async def answer(writer, body):
        await stream(writer, chat("a", finish="stop"), usage(1, 1), DONE)

    server.answer = answer
    (tmp_path / "p.txt").write_text("eins\n\nzwei\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "drei\\nvier"}\n')
    figures = bench(
        "--requests",
        "3",
        "--prompts",
        str(tmp_path / "p.txt"),
        "--password",
        "s3cret",
        "--extra-body",
        '{"temperature": 0}',
        "--model",
        "mine",
        "--natural-stop",
        "--note",
        "test machine",
    )
    bench("--requests", "1", "--prompts", str(tmp_path / "p.jsonl"), "--api-key", "k3y", "--warmup", "2")
    assert [b["messages"][0]["content"] for b in server.bodies] == ["eins", "zwei", "eins"] + [
        "drei\nvier"
    ] * 3
    body = server.bodies[0]
    assert (body["temperature"], body["model"], body["password"]) == (
        0,
        "mine",
        "s3cret",
    ) and "ignore_eos" not in body
    assert (
        server.bodies[-1]["ignore_eos"] is True
        and server.bodies[-1]["stop_tokens"] == []
        and "password" not in server.bodies[-1]
    )
    assert (
        "Authorization: Bearer s3cret" in server.heads[0] and "Authorization: Bearer k3y" in server.heads[-1]
    )
    assert figures["note"] == "test machine"
    lines = bench.file.read_text()
    assert lines.count("\n") == 2 and json.loads(lines.splitlines()[1])["succeeded"] == 1
    assert "s3cret" not in lines and "k3y" not in lines


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_prints_what_has_been_measured(server, bench, processes):
    async def answer(writer, body):
        if len(server.bodies) > 4:
            open_stream(writer)
            await send(writer, chat("a"))
            await asyncio.sleep(60)
        await stream(writer, chat("abc", finish="stop"), usage(2, 3), DONE)

    server.answer = answer
    run = subprocess.Popen(
        bench.command("--requests", "20", "--concurrency", "3", "--processes", processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(7):  # four that are answered, three that hang
        assert server.asked.acquire(timeout=60)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    figures = bench.figures()
    assert (run.returncode, err) == (130, "")
    assert (figures["succeeded"], figures["failed"], figures["unfinished"], figures["output_tokens"]) == (
        4,
        0,
        3,
        12,
    )
    assert "4 of 20 succeeded, 0 failed, 3 cut short" in out


def test_a_bar_runs_where_stderr_is_a_terminal(server, bench):
    async def answer(writer, body):
        await stream(writer, chat("a", finish="stop"), usage(1, 1), DONE)

    server.answer = answer
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    said = bytearray()

    def read() -> None:
        """All of it, as it comes: there is little room."""
        with suppress(OSError):  # as nobody has the other end any more
            while data := os.read(ours, 4096):
                said.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    command = bench.command("--requests", "4")
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=120, check=True)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert b"4/4" in said


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency"),
        (["--requests", "0"], "--requests"),
        (["--batch", "4"], "--batch"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--extra-body", '{"stream": true}'], "--extra-body"),
        (["--prompts", "/nowhere/p.txt"], "--prompts"),
        (["--json", "/nowhere/o.jsonl"], "--json"),
        (["--url", "ftp://x"], "--url"),
        (["--timeout", "inf"], "--timeout"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_flags_end_with_one_sentence_and_code_2(bench, flags, names):
    assert names in bench.refused(*flags)


def test_no_server_ends_with_one_sentence_and_code_2(server, bench):
    fake = FakeServer()
    fake.close()
    assert f"nothing answers at http://127.0.0.1:{fake.port}" in bench.refused(
        "--url", f"http://127.0.0.1:{fake.port}/v1"
    )
    assert server.bodies == []
