"""Rows that a grammar binds, beside others, in steps that are queued ahead or not."""

import json
import re
import threading

import pytest
from ahead import LateRunner
from engine_driver import PROMPTS, Driver
from msgspec.structs import replace

from rwkv_batch.engine.constraints import masks
from rwkv_batch.engine.constraints.compiling import THREADS
from rwkv_batch.runner import backends
from rwkv_batch.text.grammars import GrammarCompiler, MaskThreads
from rwkv_batch.wire.codec import decode_paused
from rwkv_batch.wire.commands import PAUSED, GetDocument, PauseRequest
from rwkv_batch.wire.protocol import (
    Accepted,
    AnswerHead,
    Grammar,
    MixturePart,
    Progress,
    Rejected,
    RowDelta,
    Sampling,
)

HOT = Sampling(temperature=1.5, seed=3)
PLATE = Grammar("regex", "[A-Z]{2}-[0-9]{3}")
FRUIT = Grammar("choice", json.dumps(["apple", "pear", "plum"]))
LIST = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 3}))
SUM = Grammar("grammar", 'root ::= [0-9] ("+" [0-9]){2}')
VALID = {
    PLATE: lambda text: re.fullmatch("[A-Z]{2}-[0-9]{3}", text),
    FRUIT: lambda text: text in ("apple", "pear", "plum"),
    LIST: lambda text: len(json.loads(text)) <= 3,
    SUM: lambda text: re.fullmatch(r"\d\+\d\+\d", text),
}
ARGUMENTS = {"field": "tools[2].function.parameters", "schema": {"not": {}}}
CALLS = Grammar("calls", json.dumps({"first": [[ARGUMENTS]], "more": [], "until": ""}))
LATE = Grammar("grammar", 'start: "xx" a\na: b | a a\nb: a | "x" b')  # while it runs


@pytest.fixture(params=["at once", "ahead"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    if request.param == "ahead":
        monkeypatch.setattr(backends, "TorchRunner", LateRunner)
    return Driver(max_rows=8)


def bound(driver: Driver, grammar: Grammar, **fields) -> str:
    return driver.add(PROMPTS[0], **{"grammar": grammar, "max_tokens": 120, "sampling": HOT} | fields)


def whole(events: list) -> RowDelta:
    """The text of the only row."""
    rows = [row for event in events if isinstance(event, Progress) for row in event.rows]
    logprobs = [entry for row in rows for entry in row.logprobs]
    text = "".join(row.text for row in rows)
    return RowDelta(0, text, sum(row.tokens for row in rows), rows[-1].finish_reason, logprobs)


def answer(driver: Driver, name: str) -> RowDelta:
    return whole(driver.until(name, (Progress,)))


@pytest.mark.parametrize("grammar", VALID, ids=lambda grammar: grammar.kind)
def test_the_text_is_what_the_grammar_says(driver: Driver, grammar: Grammar):
    names = [bound(driver, grammar, sampling=Sampling(temperature=1.5, seed=seed)) for seed in range(6)]
    for answered in [answer(driver, name) for name in names]:
        assert answered.finish_reason == "stop" and VALID[grammar](answered.text)


def test_rows_beside_it_draw_what_they_draw_alone(driver: Driver):
    alone = [answer(driver, driver.add(prompt, max_tokens=30)) for prompt in PROMPTS]
    bound_names = [bound(driver, grammar) for grammar in VALID]
    beside = [driver.add(prompt, max_tokens=30) for prompt in PROMPTS]
    assert [answer(driver, name) for name in beside] == alone
    for name, grammar in zip(bound_names, VALID, strict=True):
        assert VALID[grammar](answer(driver, name).text)


def test_the_same_seed_draws_the_same_text_ahead_and_streamed(monkeypatch: pytest.MonkeyPatch):
    texts = set()
    for runner in (backends.TorchRunner, LateRunner):
        monkeypatch.setattr(backends, "TorchRunner", runner)
        for flush in (0, 1):
            driver = Driver()
            texts.add(answer(driver, bound(driver, PLATE, flush_tokens=flush)).text)
    assert len(texts) == 1


def test_masks_that_take_long_hold_up_nobody(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """One mask does not come before the others have finished."""
    held, free = threading.Event(), threading.Event()
    make = MaskThreads.masks

    def late(self, matchers):
        held.set()
        assert free.wait(60)
        return make(self, matchers)

    monkeypatch.setattr(masks, "QUICK", -1.0)  # every mask is slow
    monkeypatch.setattr(masks, "PATIENCE", -1.0)
    monkeypatch.setattr(MaskThreads, "masks", late)
    slow = bound(driver, FRUIT)
    while not held.wait(0.01):
        driver.step()  # which takes the grammar in when it has been compiled
    others = [driver.add(prompt, max_tokens=20) for prompt in PROMPTS]
    assert [answer(driver, name).tokens for name in others] == [20] * len(PROMPTS)
    free.set()
    assert VALID[FRUIT](answer(driver, slow).text)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "(a"), "regular expression"),
        (Grammar("json_schema", '{"type": "thing"}'), "JSON schema"),
        (Grammar("json_schema", '{"not": {}}'), "JSON schema"),
        (Grammar("grammar", "start: nowhere"), "grammar"),
        (Grammar("regex", "a" * 300_000), "at most"),
        (CALLS, "JSON schema of tools[2].function.parameters cannot be used: #/not"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(driver: Driver, grammar: Grammar, words: str):
    other = driver.add(PROMPTS[1], max_tokens=5)
    rejected = driver.until(bound(driver, replace(grammar, field="tools")), (Rejected,))[-1]
    assert rejected.reason == "invalid" and words in rejected.message and rejected.message.endswith(".")
    assert f" of {rejected.field} " in rejected.message and rejected.field.startswith("tools")
    assert answer(driver, other).tokens == 5


def test_a_grammar_that_becomes_too_much_ends_its_own_request(driver: Driver):
    other = driver.add(PROMPTS[1], max_tokens=40)
    late = replace(LATE, field="guided_grammar")
    rejected = driver.until(bound(driver, late, sampling=Sampling(seed=1)), (Rejected,))[-1]
    assert rejected.reason == "invalid" and "simplify" in rejected.message
    assert rejected.field == "guided_grammar" and " of guided_grammar " in rejected.message
    assert answer(driver, other).tokens == 40
    assert VALID[FRUIT](answer(driver, bound(driver, FRUIT)).text)


def test_a_stop_string_ends_the_text_first(driver: Driver):
    cut = answer(driver, bound(driver, PLATE, stop_strings=["-"]))
    assert cut.finish_reason == "stop" and re.fullmatch("[A-Z]{2}", cut.text)


def test_max_tokens_cuts_it(driver: Driver):
    cut = answer(driver, bound(driver, Grammar("regex", "[0-9]{50}"), max_tokens=4))
    assert (cut.finish_reason, cut.tokens) == ("length", 4) and cut.text.isdecimal()


def test_logprobs_are_those_of_the_model(driver: Driver):
    answered = answer(driver, bound(driver, FRUIT, top_logprobs=2))
    assert b"".join(entry.token for entry in answered.logprobs).decode() == answered.text
    assert all(len(entry.top) == 2 and entry.logprob < -0.01 for entry in answered.logprobs)


def test_bias_chooses_among_what_is_allowed(driver: Driver):
    """ord("p") + 1 is the token of the byte."""
    biased = Sampling(temperature=1.0, seed=1, logit_bias={ord("a") + 1: -100.0, ord("x") + 1: 100.0})
    names = [bound(driver, FRUIT, sampling=biased) for _ in range(4)]
    assert {answer(driver, name).text for name in names} <= {"pear", "plum"}


def test_a_thought_comes_first_and_is_free(driver: Driver):
    head = AnswerHead(rest=">", closes="k>")
    grammar = Grammar("choice", FRUIT.source, head)
    close = {token: 12.0 for token in map((lambda byte: byte + 1), b"k>")}
    answered = answer(
        driver, bound(driver, grammar, max_tokens=400, sampling=Sampling(seed=5, logit_bias=close))
    )
    opened, _, rest = answered.text.partition("k>")
    assert answered.finish_reason == "stop" and opened.startswith(">") and VALID[FRUIT](rest.lstrip("\n"))


def test_id_0_ends_it_although_it_is_no_stop(driver: Driver):
    answered = answer(driver, bound(driver, FRUIT, stop_ids=[]))
    assert answered.finish_reason == "stop" and VALID[FRUIT](answered.text)


def test_turns_of_a_session_are_bound_one_by_one(driver: Driver):
    for grammar in (FRUIT, PLATE):
        assert VALID[grammar](answer(driver, bound(driver, grammar, session="s")).text)
    assert answer(driver, driver.add(PROMPTS[0], "s", 5)).tokens == 5


def test_a_mixture_of_states_is_bound(driver: Driver):
    mixture = [MixturePart("", 1.0), MixturePart("", 0.0)]
    assert VALID[FRUIT](answer(driver, bound(driver, FRUIT, mixture=mixture)).text)


def test_requests_that_are_dropped_while_they_compile_say_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    """Those that a thread has begun with leave nothing to do; no thread begins with the rest."""
    free, ended, begun = threading.Event(), threading.Semaphore(0), []

    def held(self, text):
        begun.append(text)
        assert free.wait(60)
        try:
            return matcher(self, text)
        finally:
            ended.release()

    matcher = GrammarCompiler.matcher
    monkeypatch.setattr(GrammarCompiler, "matcher", held)
    names = [bound(driver, Grammar("regex", "ab" * n)) for n in range(1, THREADS + 3)]
    for name in names:
        driver.engine.cancel((b"test", name))
    other = driver.add(PROMPTS[1], max_tokens=20)
    answer(driver, other)
    free.set()
    last = bound(driver, FRUIT)  # behind all others
    assert VALID[FRUIT](answer(driver, last).text)
    for _ in begun:
        assert ended.acquire(timeout=60)
    assert len(begun) <= THREADS + 1 and driver.events.keys() == {other, last}
    assert driver.engine.drained and not driver.engine.busy


def test_the_request_is_accepted_with_its_tokens(driver: Driver):
    accepted = driver.until(bound(driver, FRUIT), (Progress,))[0]
    assert isinstance(accepted, Accepted) and accepted.prompt_tokens == [3]


def test_rows_of_one_request_are_bound_each_for_itself(driver: Driver):
    sampling = Sampling(temperature=2.0, seed=4)
    name = bound(driver, FRUIT, n=6, sampling=sampling)
    events = driver.until(name, (Progress,))
    while sum(row.finish_reason is not None for e in events[1:] for row in e.rows) < 6:
        driver.step()
        events = driver.events[name]
    texts = {row.row: row.text for event in events[1:] for row in event.rows}
    assert len(texts) == 6 and all(map(VALID[FRUIT], texts.values())) and len(set(texts.values())) > 1


def test_a_paused_request_goes_on_by_its_grammar(driver: Driver):
    """It is compiled again, and has read what was drawn before."""
    fields = {"name": "it", "flush_tokens": 1, "sampling": Sampling(temperature=1.5, seed=9)}
    whole_text = answer(driver, bound(driver, PLATE, **fields)).text
    name = bound(driver, PLATE, **fields)
    while len(driver.text(name)) < 3:
        driver.step()
    driver.ask(PauseRequest("pause", "it"))
    first = driver.text(name)
    paused = decode_paused(driver.ask(GetDocument("document", PAUSED + "it")).data)
    driver.engine.add((b"test", "again"), replace(paused, id="again"))
    assert first + answer(driver, "again").text == whole_text and VALID[PLATE](whole_text)
