"""From answers, as they arrive, to figures: tokens that really came, latencies, a table, a JSON object."""

import functools
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyrwkv_tokenizer
from msgspec import Struct

if TYPE_CHECKING:
    from bench.load import LoadPlan

LATENCIES = {
    "e2e_ms": "E2E per request",
    "ttft_ms": "TTFT per row",
    "itl_ms": "ITL per token",
    "event_gap_ms": "gap between events",
}


class Content(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: Content | None = None
    message: Content | None = None
    finish_reason: str | None = None


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class ReplyBody(Struct):
    """A whole reply or one streamed event, of any of the APIs; what is not measured is skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_read_reply = msgspec.json.Decoder(ReplyBody).decode


@dataclass
class Record:
    """The answer to one request. Times are seconds of `time.monotonic`.

    The arrays hold one item per text event of a row.
    """

    index: int
    start: float
    late: float  # seconds after the moment it was due
    end: float = 0.0
    failure: str = ""  # empty: it succeeded
    streamed: bool = False
    times: array = field(default_factory=lambda: array("d"))  # when the text was read
    rows: array = field(default_factory=lambda: array("l"))  # whose text it is
    texts: dict[int, list[str]] = field(default_factory=dict)  # of each row, one item an event
    finish: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # prompt and completion tokens, if the server says so


class Answer:
    """Takes the body of one reply in pieces and fills a record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False  # [DONE] has come
        self._tail = b""  # a line that has not ended yet
        self._event: list[bytes] = []

    def feed_events(self, data: bytes, now: float) -> int:
        """Body bytes of an event stream. Returns how many text events they completed."""
        self.record.streamed = True
        before = len(self.record.times)
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._event.append(line[5:])
            elif not line and self._event:
                self._take(b"\n".join(self._event).strip(), now)
                self._event.clear()
        return len(self.record.times) - before

    def take_whole(self, body: bytes, now: float) -> None:
        """The body of a reply that is not streamed."""
        self._read(body, now, "the reply")
        if not self.record.failure and not self.record.texts and not self.record.finish:
            self.record.failure = "the reply holds no choices"

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
        else:
            self._read(data, now, "an event")

    def _read(self, data: bytes, now: float, what: str) -> None:
        try:
            reply = _read_reply(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.record.failure = (
                self.record.failure or f"{what} is not the JSON of an OpenAI-compatible reply"
            )
            return
        record = self.record
        if reply.error:
            record.failure = record.failure or f"error in {what}: {error_text(data)}"
        for choice in reply.choices:
            part = choice.delta or choice.message
            text = choice.text or ""
            if part:
                text = (part.reasoning_content or "") + (part.content or "")
                if part.tool_calls:
                    text += msgspec.json.encode(part.tool_calls).decode()
            if text:
                record.times.append(now)
                record.rows.append(choice.index)
                record.texts.setdefault(choice.index, []).append(text)
            if choice.finish_reason:
                record.finish[choice.index] = choice.finish_reason
        if reply.usage:
            record.usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)


def error_text(body: bytes) -> str:
    """The sentence in an error body of any of the usual shapes, on one line."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = body.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:200]


def summarize(plan: "LoadPlan", records: list[Record], unfinished: int, generator_cpu: float) -> dict:
    """The figures of a run. Only requests that succeeded count for tokens and latencies.

    Duration runs from the first request sent to the last answer ended. A figure without samples is None.
    """
    good = [r for r in records if not r.failure]
    failures = Counter(r.failure for r in records if r.failure)
    duration = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    sources, inputs, outputs, rows, disagreements = Counter[str](), 0, 0, 0, 0
    events, streamed_tokens = 0, 0
    samples: dict[str, list] = {name: [] for name in LATENCIES}
    for record in good:
        tokens, source = row_tokens(record, plan.output_tokens)
        sources[source] += 1
        outputs, rows = outputs + sum(tokens.values()), rows + len(tokens)
        inputs += (
            record.usage[0] if record.usage else sum(map(token_count, plan.request_prompts(record.index)))
        )
        disagreements += disagrees(record, plan)
        samples["e2e_ms"].append([(record.end - record.start) * 1e3])
        if record.streamed:
            events, streamed_tokens = events + len(record.times), streamed_tokens + sum(tokens.values())
            for name, values in stream_latencies(record, tokens).items():
                samples[name].append(values * 1e3)
    return {
        "requests": plan.requests,
        "succeeded": len(good),
        "failed": len(records) - len(good),
        "unfinished": unfinished,
        "failures": dict(failures.most_common()),
        "empty": sum(1 for r in good if not r.texts),
        "finish_reasons": dict(Counter(reason for r in good for reason in r.finish.values())),
        "duration_s": round(duration, 4),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "input_tokens_per_prompt": _mean(inputs, len(good) * plan.rows),
        "output_tokens_per_row": _mean(outputs, rows),
        "input_tokens_from": dict(Counter("usage" if r.usage else "prompt text" for r in good)),
        "output_tokens_from": dict(sources),
        "output_tokens_reencoded": sum(
            token_count("".join(parts)) for r in good for parts in r.texts.values()
        ),
        "usage_disagrees": disagreements,
        "text_events": events,
        "tokens_per_event": _mean(streamed_tokens, events),
        "requests_per_s": _rate(len(good), duration),
        "input_tokens_per_s": _rate(inputs, duration),
        "output_tokens_per_s": _rate(outputs, duration),
        **{name: spread(values) for name, values in samples.items()},
        "send_delay_ms": spread([[r.late * 1e3 for r in records]]),
        "generator_cpu": round(generator_cpu, 3),
    }


def row_tokens(record: Record, max_tokens: int) -> tuple[dict[int, int], str]:
    """Tokens of each row, and where they are known from.

    The server's usage comes first; several rows share it in proportion to their texts. A row that the server
    says it ended for length has drawn `max_tokens`. What is left is the text, encoded again.
    """
    rows = sorted({*record.texts, *record.finish})
    encoded = {row: token_count("".join(record.texts.get(row, []))) for row in rows}
    if record.usage:
        with_text = [row for row in rows if encoded[row]]
        if not with_text:
            return dict.fromkeys(rows, 0) | {0: record.usage[1]}, "usage"
        shared = allot(record.usage[1], np.array([encoded[row] for row in with_text]))
        return dict.fromkeys(rows, 0) | dict(zip(with_text, shared.tolist(), strict=True)), "usage"
    by_length = [row for row in rows if record.finish.get(row) == "length"]
    tokens = encoded | dict.fromkeys(by_length, max_tokens)
    if len(by_length) == len(rows):
        return tokens, "finish reason"
    return tokens, "finish reason and text" if by_length else "text"


def disagrees(record: Record, plan: "LoadPlan") -> bool:
    """Whether the usage cannot be true.

    It has fewer tokens than text events, more than were allowed, none for a text, or some for no text.
    """
    if not record.usage:
        return False
    tokens, rows = record.usage[1], max(1, len({*record.texts, *record.finish}))
    ended_for_length = sum(1 for reason in record.finish.values() if reason == "length")
    return (
        not max(len(record.times), ended_for_length * plan.output_tokens)
        <= tokens
        <= rows * plan.output_tokens
    )


def stream_latencies(record: Record, tokens: dict[int, int]) -> dict[str, np.ndarray]:
    """TTFT, per-token ITL and gaps between events of every row of a streamed answer, in seconds.

    Events that came in one read came at one moment and count as one. A gap before an event of k tokens is k
    gaps of a k-th of it. How many tokens an event holds follows from its text, scaled so that they add up to
    what the row really brought.
    """
    times, rows = np.array(record.times), np.array(record.rows)
    first, per_token, gaps = [], [np.zeros(0)], [np.zeros(0)]
    for row, texts in record.texts.items():
        moments, which = np.unique(times[rows == row], return_inverse=True)
        held = np.bincount(which, event_tokens(texts, tokens[row])).astype(int)
        first.append(moments[0] - record.start)
        gaps.append(np.diff(moments))
        counted = (held > 0) | (
            np.arange(len(held)) == 0
        )  # an event without a token of its own lengthens the next gap
        per_token.append(np.repeat(np.diff(moments[counted]) / held[counted][1:], held[counted][1:]))
    return {
        "ttft_ms": np.array(first),
        "itl_ms": np.concatenate(per_token),
        "event_gap_ms": np.concatenate(gaps),
    }


def event_tokens(texts: list[str], total: int) -> np.ndarray:
    """How the tokens of a row were spread over its events."""
    if total == len(texts):
        return np.ones(total, int)
    return allot(total, np.array([token_count(text) for text in texts]))


def allot(total: int, weights: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to `weights` (all > 0) that add up to `total`.

    None is 0 if `total` is at least their number.
    """
    quota, small = weights / weights.sum() * total, np.zeros(len(weights), bool)
    if total >= len(weights):
        while (too_small := ~small & (quota < 1)).any():
            small |= too_small
            quota = np.where(small, 1.0, weights / weights[~small].sum() * (total - small.sum()))
    held = np.floor(quota).astype(int)
    largest_remainders = np.argsort(held - quota, kind="stable")[: total - held.sum()]
    held[largest_remainders] += 1
    return held


def spread(samples: Iterable) -> dict[str, float] | None:
    """Mean, median and 99th percentile (linear between samples); None without samples."""
    values = np.concatenate([np.zeros(0), *samples])
    if not len(values):
        return None
    median, p99 = np.percentile(values, (50, 99))
    return {
        name: round(float(v), 4) for name, v in (("mean", values.mean()), ("median", median), ("p99", p99))
    }


def table(figures: dict) -> str:
    """The figures for people, in aligned columns."""
    f = figures
    rows = [
        (
            "requests",
            f"{f['succeeded']} of {f['requests']} succeeded, {f['failed']} failed"
            + (f", {f['unfinished']} cut short" if f["unfinished"] else ""),
        ),
        *(("", f"{count} x {reason}") for reason, count in f["failures"].items()),
        ("duration", f"{f['duration_s']:.2f} s"),
    ]
    if f["succeeded"]:
        rows.append(("input tokens", _tokens(f, "input_tokens", "prompt")))
    if f["output_tokens_per_row"] is not None:
        rows.append(("output tokens", _tokens(f, "output_tokens", "row")))
    if f["empty"]:
        rows.append(("", f"{f['empty']} answers without text"))
    if f["usage_disagrees"]:
        rows.append(
            ("", f"{f['usage_disagrees']} answers whose usage does not fit their events or max_tokens")
        )
    if f["text_events"]:
        rows.append(("text events", f"{f['text_events']} ({f['tokens_per_event']:.2f} tokens each)"))
    rows += [
        ("requests/s", f"{f['requests_per_s']:.2f}"),
        ("input tokens/s", f"{f['input_tokens_per_s']:.1f}"),
        ("output tokens/s", f"{f['output_tokens_per_s']:.1f}"),
        (
            "generator CPU",
            f"{f['generator_cpu']:.0%} of a core in the busiest process"
            + (": too busy to measure well, raise --processes" if f["generator_cpu"] > 0.9 else ""),
        ),
    ]
    lines = [f"{name:<20}{value}" for name, value in rows]
    lines += ["", f"{'ms':<20}{'mean':>12}{'median':>12}{'P99':>12}"]
    for name, title in {**LATENCIES, "send_delay_ms": "send delay"}.items():
        if f[name]:
            lines.append(
                f"{title:<20}" + "".join(f"{f[name][column]:>12.2f}" for column in ("mean", "median", "p99"))
            )
    return "\n".join(lines)


def _tokens(f: dict, name: str, unit: str) -> str:
    return (
        f"{f[name]} ({f[f'{name}_per_{unit}']:.1f} a {unit}; counted from {' and '.join(f[f'{name}_from'])})"
    )


def _mean(total: int, count: int) -> float | None:
    return round(total / count, 3) if count else None


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def token_count(text: str) -> int:
    """Tokens of a text in the World vocabulary."""
    return len(tokenizer().encode(text)) if text else 0


@functools.cache
def tokenizer() -> pyrwkv_tokenizer.RWKVTokenizer:
    return pyrwkv_tokenizer.RWKVTokenizer()
