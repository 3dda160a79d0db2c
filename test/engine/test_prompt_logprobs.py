"""Logprobs of prompts against the PyPI package `rwkv`, at any cut of a prompt, and beside any others."""

import pytest
import torch
from ahead import LateRunner
from reference import Reference
from scores import TEXTS, answers, expected, rows_in, scoring

from rwkv_batch.engine import Engine
from rwkv_batch.runner import backends
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import (
    Accepted,
    GenerateRequest,
    MixturePart,
    Rejected,
    Sampling,
    SessionTurn,
)

pytestmark = pytest.mark.thorough

CLOSE = 1e-3


def engine_of(**options) -> Engine:
    return Engine(device="cpu", **{"max_rows": 4, "prefix_cache_mb": 0} | options)


@pytest.fixture(scope="module")
def truths(reference: Reference) -> dict[str, torch.Tensor]:
    """For each of the texts, what the package expects."""
    return {text: expected(reference, reference.tokenizer.encode(text)) for text in TEXTS}


def check(reference: Reference, tokens: list[int], entries, top: int, start: int = 1, truth=None) -> None:
    """The entries of the tokens from `start` on. truth: what is expected, if it is known."""
    data = reference.tokenizer.token_bytes
    truth = expected(reference, tokens) if truth is None else truth
    wanted, following = truth[start - 1 :], tokens[start:]
    assert [entry.token for entry in entries] == [data(token) for token in following]
    for entry, line, token in zip(entries, wanted, following, strict=True):
        assert entry.logprob == pytest.approx(float(line[token]), abs=CLOSE)
        values, ids = line[:VOCABULARY].topk(top + 1)
        assert [p for _, p in entry.top] == pytest.approx(values[:top].tolist(), abs=CLOSE)
        if top and bool((values[:-1] - values[1:] > CLOSE).all()):  # no near-ties
            assert [name for name, _ in entry.top] == [data(id_) for id_ in ids[:top].tolist()]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("prefill_tokens", [1, 7, 64, 1024])
def test_every_prompt_has_the_packages_logprobs(reference, truths, monkeypatch, prefill_tokens, ahead):
    if ahead:
        monkeypatch.setattr(backends, "TorchRunner", LateRunner)
    engine = engine_of(prefill_tokens=prefill_tokens)
    requests = [scoring(text, i, max_tokens=i % 3, prompt_logprobs=i) for i, text in enumerate(TEXTS)]
    # beside them, rows that want none
    others = [GenerateRequest(id=str(5 + i), prompts=[TEXTS[i]], max_tokens=8) for i in range(2)]
    found = answers(engine, *requests, *others)
    for i, (text, events) in enumerate(zip(TEXTS, found, strict=False)):
        rows = rows_in(events)
        assert len(rows) == 1 and rows[0].finish_reason in ("stop", "length")
        assert rows[0].tokens <= i % 3 and (i % 3 or not rows[0].text)
        check(reference, reference.tokenizer.encode(text), rows[0].prompt, i, truth=truths[text])
    assert all(not row.prompt for events in found[5:] for row in rows_in(events))


def test_only_what_is_asked_for_is_scored(reference):
    tokens = [0, *reference.tokenizer.encode(TEXTS[3])]
    truth = expected(reference, tokens)
    engine = engine_of(prefill_tokens=32)
    starts = [0, 1, 2, 33, 64, len(tokens) - 1, len(tokens)]
    requests = [scoring(tokens, i, scored_from=start) for i, start in enumerate(starts)]
    for start, events in zip(starts, answers(engine, *requests), strict=True):
        check(reference, tokens, rows_in(events)[0].prompt, 2, max(start, 1), truth)


def test_a_cached_beginning_is_fed_again_for_those_who_want_its_logprobs(reference):
    engine = engine_of(prefix_cache_mb=64)
    text = "The quick brown fox jumps over the lazy dog. " * 30
    long = [GenerateRequest(id="0", prompts=[text], max_tokens=1)]
    answers(engine, *long)
    ((accepted, *_),) = answers(engine, *long)
    assert isinstance(accepted, Accepted) and accepted.cached_tokens
    ((accepted, *events),) = answers(engine, scoring(text))
    assert isinstance(accepted, Accepted) and not accepted.cached_tokens
    check(reference, reference.tokenizer.encode(text), rows_in(events)[0].prompt, 2)


def test_all_rows_of_a_prompt_have_them_once_also_streamed(reference, truths):
    request = GenerateRequest(
        id="0", prompts=TEXTS[:2], n=2, max_tokens=4, prompt_logprobs=1, top_logprobs=1, flush_tokens=1
    )
    (events,) = answers(engine_of(), request)
    first = {}
    for row in rows_in(events):
        assert not row.prompt or row.row not in first
        first.setdefault(row.row, row)
    assert sorted(first) == [0, 1, 2, 3]
    for number, row in first.items():
        text = TEXTS[number // 2]
        check(reference, reference.tokenizer.encode(text), row.prompt, 1, truth=truths[text])


def test_ids_and_bytes_are_said_if_asked_for(reference):
    request = GenerateRequest(
        id="0",
        prompts=[TEXTS[4], [24281, 59]],
        max_tokens=30,
        sampling=Sampling(temperature=0),
        stop_ids=[0],
        flush_tokens=3,
        return_ids=True,
        return_bytes=True,
    )
    (events,) = answers(engine_of(), request)
    accepted = events[0]
    prompts = [reference.tokenizer.encode(TEXTS[4]), [24281, 59]]
    assert isinstance(accepted, Accepted) and accepted.prompt_ids == prompts
    assert accepted.prompt_bytes == [[reference.tokenizer.token_bytes(t) for t in p] for p in prompts]
    for number, prompt in enumerate(prompts):
        drawn = [token for row in rows_in(events) if row.row == number for token in row.ids]
        counted = sum(row.tokens for row in rows_in(events) if row.row == number)
        wanted = reference.greedy(prompt, 30)
        wanted = wanted[: wanted.index(0) + 1] if 0 in wanted else wanted
        assert drawn == wanted and counted == len([token for token in wanted if token])


def test_the_id_that_ends_a_text_has_its_logprob_too(reference):
    """Who scores prompts leaves the last entry out, no matter what was drawn."""
    request = scoring(TEXTS[0], max_tokens=1, top_logprobs=0, stop_ids=list(range(65536)))
    (row,) = rows_in(answers(engine_of(), request)[0])
    tokens = reference.tokenizer.encode(TEXTS[0])
    (likeliest,) = reference.greedy(tokens, 1)
    line = expected(reference, [*tokens, likeliest])[-1]
    assert (row.tokens, row.finish_reason) == (0, "stop")
    assert [entry.token for entry in row.logprobs] == [reference.tokenizer.token_bytes(likeliest)]
    assert row.logprobs[0].logprob == pytest.approx(float(line[likeliest]), abs=CLOSE)


@pytest.mark.parametrize(
    "fields", [{"turn": SessionTurn(target="s")}, {"mixture": [MixturePart("", 0.5), MixturePart("", 0.5)]}]
)
def test_what_cannot_be_scored_is_refused(fields):
    ((event,),) = answers(engine_of(), scoring("hello", **fields))
    assert isinstance(event, Rejected) and event.reason == "invalid" and "logprobs" in event.message


def test_a_cancelled_one_leaves_nothing():
    engine = engine_of(prefill_tokens=16)
    engine.add((b"test", "0"), scoring(TEXTS[1]))
    engine.step()
    engine.cancel((b"test", "0"))
    assert not engine.busy and engine.drained and not engine.scheduler.running
