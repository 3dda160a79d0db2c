"""Turns of sessions: wherever a state comes from, the text is that of one conversation."""

from pathlib import Path
from random import Random

import pytest
import torch
from ahead import LateRunner, SeveralRunner, without_time
from engine_driver import PROMPTS, SAMPLED, WEIGHTS, Driver
from msgspec.structs import replace

from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.runner import backends
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.log.writer import Writer
from rwkv_batch.state.pool import savepoints
from rwkv_batch.state.pool.savepoints import LEAST_TOKENS
from rwkv_batch.wire.commands import DeleteSession, ForkSession, RewindSession, SessionHistory
from rwkv_batch.wire.protocol import Accepted, Failed, GenerateRequest, Progress, Sampling, SessionTurn

ASCII = Sampling(temperature=1.5, logit_bias=dict.fromkeys([0, *range(129, 400)], -100.0))
STOPS = ["a", "e!", "\x10", "\x11\x12", "b", "3 "]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Savepoints are made as often as those of a large model."""
    monkeypatch.setattr(savepoints, "WORTHWHILE", 0.0)


@pytest.mark.parametrize("stops", [[], ["a", "e", "1", "\x10"]], ids=["to the end", "stop strings"])
@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=0)], ids=["seeded", "greedy"])
def test_a_conversation_is_the_same_wherever_its_state_comes_from(
    tmp_path: Path, sampling: Sampling, stops: list[str]
) -> None:
    fields = {"sampling": sampling, "stop_strings": stops, "max_tokens": 12}
    expected = Driver(l1=4, l2=4).conversation("a", **fields)
    others = {
        "tokens": Driver(l1=0, l2=0),
        "host memory": Driver(l1=0, l2=4),
        "images": Driver(Store(tmp_path / "images.db"), l1=0, l2=0, replay_tokens=1),
        "states only": Driver(Store(tmp_path / "states.db"), l1=0, l2=0, token_log=False),
    }
    assert {name: driver.conversation("a", **fields) for name, driver in others.items()} == dict.fromkeys(
        others, expected
    )


def test_a_conversation_begins_in_the_models_start_state(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    start = {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}
    weights = from_tensors("tuned", WEIGHTS.tensors | start)
    said = {
        "slots": Driver(weights=weights, l1=4, l2=4).conversation("a"),
        "tokens": Driver(weights=weights, l1=0, l2=0).conversation("a"),
        "images": Driver(Store(tmp_path / "images.db"), weights, l1=0, replay_tokens=1).conversation("a"),
    }
    assert said == dict.fromkeys(said, said["slots"])
    assert said["slots"] != Driver(l1=4).conversation("a")


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    expected = Driver(l1=4).conversation("a")
    said = []
    for prompt in PROMPTS:
        driver = Driver(Store(tmp_path / "sessions.db"), l1=1)
        said.append(driver.say(prompt, "a"))
        driver.engine.close()
    assert said == expected


@pytest.mark.parametrize("token_log", [True, False], ids=["tokens", "states only, in memory"])
def test_a_turn_that_is_cancelled_is_as_if_it_had_never_been(token_log: bool) -> None:
    expected = Driver(l1=4).conversation("a")
    driver = Driver(l1=4, token_log=token_log)
    said = [driver.say(PROMPTS[0], "a")]
    name = driver.add([77] * 30, "a", max_tokens=1000, flush_tokens=1)
    while not any(isinstance(event, Progress) for (_, id_), event in driver.engine.step() if id_ == name):
        pass
    driver.engine.cancel((b"test", name))
    assert said + driver.conversation("a", PROMPTS[1:]) == expected


@pytest.mark.parametrize("how", [{}, {"stop_strings": ["\x10"]}], ids=["cancelled", "ended early"])
def test_a_state_that_nothing_brings_back_stays_while_a_turn_goes_on_from_it(how: dict) -> None:
    """Though there is no room, as other sessions end meanwhile."""
    driver = Driver(l1=1, l2=4, token_log=False)
    driver.say(PROMPTS[0], "a")
    name = driver.add(PROMPTS[1], "a", max_tokens=40, flush_tokens=1, **how)
    while not driver.text(name):
        driver.step()
    for other in ("b", "c"):
        driver.say(PROMPTS[2], other, max_tokens=1)
    if not how:
        driver.engine.cancel((b"test", name))
    else:
        driver.said(name)
    assert driver.say(PROMPTS[3], "a")[1] == 6
    driver.engine.close()


class TestWhatIsReadAgain:
    """A turn goes on from the state of its session, no matter what became of the turn before."""

    def driver(self) -> Driver:
        driver = Driver(l1=4)
        driver.say([20 + i % 300 for i in range(500)], "a", max_tokens=1)
        return driver

    def fed(self, driver: Driver, prompt: list[int], **fields) -> int:
        """Tokens of prompts that are fed for a turn and after it, while a further one waits for it."""
        before = driver.engine.counts.prefill_tokens
        driver.say(prompt, "a", **fields)
        driver.say([7], "a", max_tokens=1)
        driver.engine.close()
        return driver.engine.counts.prefill_tokens - before

    def test_after_a_turn_that_was_cancelled(self) -> None:
        driver = self.driver()
        name = driver.add([77] * 30, "a", max_tokens=1000, flush_tokens=1)
        while not driver.text(name):
            driver.step()
        driver.engine.cancel((b"test", name))
        assert self.fed(driver, PROMPTS[1], max_tokens=1) < 10

    def test_after_a_stop_string_of_several_tokens(self) -> None:
        text, _ = self.driver().say(PROMPTS[1], "a", max_tokens=12)
        fields = {"max_tokens": 12, "stop_strings": [text[-6:]]}
        assert self.driver().say(PROMPTS[1], "a", **fields)[0] == text[:-6]
        assert self.fed(self.driver(), PROMPTS[1], **fields) < 40

    @pytest.mark.parametrize("full", [False, True], ids=["room in L1", "L1 is full"])
    def test_after_a_long_answer_that_a_stop_string_ends(self, full: bool) -> None:
        """What is behind the last of the states that were saved as it was drawn."""
        text, drawn = self.driver().say(PROMPTS[1], "a", max_tokens=200)
        fields = {"max_tokens": 200, "stop_strings": [text[-6:]]}
        driver = self.driver()
        for other in "bcd"[: 3 if full else 0]:
            driver.say(PROMPTS[1], other, max_tokens=1)
        before = driver.engine.pool.counted["to_host"]
        assert self.fed(driver, PROMPTS[1], **fields) < 2 * LEAST_TOKENS < drawn
        assert driver.engine.pool.counted["to_host"] - before <= 1, "of the idle sessions one makes room"

    def test_after_a_long_first_turn_whose_stop_string_began_before_the_newest_savepoint(self) -> None:
        prompt = [20 + i % 300 for i in range(500)]
        text, drawn = Driver(l1=4).say(prompt, "a", max_tokens=3 * LEAST_TOKENS + 2)
        fields = {"max_tokens": drawn + 2, "stop_strings": [text[-5:]]}
        said = {}
        for driver in (Driver(l1=0, l2=0), Driver(l1=4)):
            driver.say(prompt, "a", **fields)
            said[driver] = driver.say(PROMPTS[1], "a")
        assert len(set(said.values())) == 1
        assert self.fed(Driver(l1=4), prompt, **fields) < len(prompt) + 2 * LEAST_TOKENS


def test_a_model_that_reads_fast_makes_few_savepoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savepoints, "WORTHWHILE", 1e9)
    driver = Driver(l1=4)
    driver.say(PROMPTS[0], "a", max_tokens=100, stop_strings=["\x10\x10\x10"])
    assert driver.engine.runner.states.copied == 0
    driver.engine.close()


@pytest.mark.parametrize("runner", [LateRunner, SeveralRunner], ids=["a step ahead", "several steps"])
def test_turns_that_end_at_stop_strings_leave_the_states_of_their_texts(
    runner: type[LateRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at a time, of more sessions than L1 has room for, some of them cancelled."""
    rng, plain = Random(7), Driver(l1=0, l2=0, max_rows=1)
    monkeypatch.setattr(backends, "TorchRunner", runner)
    without_time(monkeypatch)
    driver = Driver(l1=4, l2=2, max_rows=3)
    history: dict[str, list[int]] = {key: [] for key in "abcde"}
    for _ in range(25):
        asked = {}
        for key in rng.sample(sorted(history), 3):
            prompt = rng.choices(range(20, 300), k=rng.choice([1, 5, 40]))
            fields = {"max_tokens": rng.choice([5, 40, 100]), "stop_strings": rng.choices(STOPS, k=2)}
            fields |= {"sampling": replace(ASCII, seed=rng.getrandbits(40)), "flush_tokens": 1}
            asked[driver.add(prompt, key, **fields)] = key, prompt, fields
        cancelled = rng.choice(sorted(asked)) if rng.random() < 0.3 else ""
        if cancelled:
            for _ in range(rng.randrange(60)):
                driver.step()
            driver.engine.cancel((b"test", cancelled))
        for name, (key, prompt, fields) in asked.items():
            if name != cancelled:
                assert driver.said(name)[0] == plain.say(history[key] + prompt, **fields)[0]
            turns = driver.ask(SessionHistory(f"of {key}", key)).turns
            history[key] = [token for turn in turns for token in turn.prompt_tokens + turn.completion_tokens]
    for each in (driver, plain):
        each.engine.close()


@pytest.mark.parametrize("stops", [[], ["\x11", "e "]], ids=["to the end", "stop strings"])
def test_sessions_begin_after_a_prefix_that_others_have_begun_with(stops: list[str]) -> None:
    """Agents do so, whose long instructions are the same."""
    common = [20 + i % 300 for i in range(400)]
    asked = [[*common, *prompt] for prompt in PROMPTS]
    fields = {"max_tokens": 12, "stop_strings": stops}
    plain = Driver(l1=8)
    expected = [plain.say(prompt, f"s{i}", **fields) for i, prompt in enumerate(asked)]
    expected += [plain.say(PROMPTS[0], f"s{i}", **fields) for i in range(len(asked))]
    driver = Driver(l1=8, prefix_cache_mb=64)
    said, fed, cached = [], [], []
    for i, prompt in enumerate(asked):
        before = driver.engine.counts.prefill_tokens
        events = driver.until(name := driver.add(prompt, f"s{i}", **fields), (Progress,))
        said.append(driver.said(name))
        fed.append(driver.engine.counts.prefill_tokens - before)
        cached += [sum(event.cached_tokens) for event in events if isinstance(event, Accepted)]
    said += [driver.say(PROMPTS[0], f"s{i}", **fields) for i in range(len(asked))]
    assert said == expected
    assert fed[0] >= len(asked[0]) and max(fed[2:]) < 150
    assert cached[0] == 0 and min(cached[2:]) >= 384
    assert driver.engine.counts.cache_hits == sum(cached)
    for each in (plain, driver):
        each.engine.close()


def test_a_leading_token_is_that_of_the_first_turn() -> None:
    driver = Driver(l1=4)
    for prompt in PROMPTS[:3]:
        driver.say(prompt, "a", prefix_ids=[0])
    turns = driver.ask(SessionHistory("history", "a")).turns
    assert [turn.prompt_tokens for turn in turns] == [[0, *PROMPTS[0]], PROMPTS[1], PROMPTS[2]]
    driver.engine.close()


@pytest.mark.parametrize("source", [None, "b"])
def test_a_turn_that_does_not_go_on_from_its_session_takes_its_place(source: str | None) -> None:
    driver = Driver()
    for session, prompt in (("a", PROMPTS[0]), ("a", PROMPTS[1]), ("b", PROMPTS[3])):
        driver.say(prompt, session)
    request = GenerateRequest("anew", [PROMPTS[2]], 6, turn=SessionTurn(source=source, target="a"))
    driver.engine.add((b"test", "anew"), request)
    driver.said("anew")
    turns = driver.ask(SessionHistory("history", "a")).turns
    assert [turn.prompt_tokens for turn in turns] == [PROMPTS[3], PROMPTS[2]][source is None :]
    driver.engine.close()


def test_a_session_that_is_deleted_while_it_begins_was_there() -> None:
    driver = Driver()
    name = driver.add(PROMPTS[0], "a", max_tokens=4)
    driver.engine.step()
    assert driver.ask(DeleteSession("1", key="a")).found == 1
    assert driver.until(name, (Progress,))
    assert driver.ask(DeleteSession("2", key="a")).found == 0
    driver.engine.close()


def test_a_turn_that_cannot_be_stored_fails_and_leaves_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Driver(l1=4).conversation("a")
    driver = Driver(Store(tmp_path / "sessions.db"), l1=4)
    said = [driver.say(PROMPTS[0], "a")]

    def full(*arguments: object) -> None:
        raise StoreError("The disk is full.")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "commit", full)
        (*_, failure) = driver.until(driver.add([77], "a"), (Failed,))
        assert failure == Failed(failure.id, "The disk is full.")
    assert said + driver.conversation("a", PROMPTS[1:]) == expected


def test_a_history_holds_what_was_said(tmp_path: Path) -> None:
    driver = Driver(Store(tmp_path / "sessions.db"))
    said = [driver.say(prompt, "a") for prompt in PROMPTS]
    reply = driver.ask(SessionHistory("history", "a"))
    assert [turn.prompt_tokens for turn in reply.turns] == PROMPTS
    assert [(turn.completion, len(turn.completion_tokens)) for turn in reply.turns] == said
    assert reply.position == reply.turns[-1].end == sum(map(len, PROMPTS)) + sum(count for _, count in said)
    assert driver.ask(RewindSession("rewind", "a", 2)).position == reply.turns[1].end
    assert driver.say(PROMPTS[2], "a") == said[2]
    driver.engine.close()


def test_who_has_an_answer_may_go_on_from_it_at_once(monkeypatch):
    """Though the state of the turn is brought to its end for a step more, as its commit was quick."""
    driver, put = Driver(l1=4), Writer.put

    def put_and_wait(writer, *args, **options):
        put(writer, *args, **options)
        assert driver.woken.wait(30)

    driver.say(PROMPTS[0], "a")
    monkeypatch.setattr(Writer, "put", put_and_wait)
    driver.say(PROMPTS[1], "a")
    monkeypatch.undo()
    assert "a" in driver.engine.scheduler.queues, "its turn is over"
    driver.ask(RewindSession("back", "a", 1))
    driver.ask(ForkSession("fork", "a", "a", replace=True))
    assert len(driver.ask(SessionHistory("turns", "a")).turns) == 1
    driver.engine.close()
