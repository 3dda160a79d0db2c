"""Turns that come, end, are cancelled, deleted, copied and rewound in any order leave sessions intact."""

from pathlib import Path
from random import Random

import pytest
from ahead import LateRunner, SeveralRunner, without_time
from engine_driver import Driver, free_slots
from msgspec.structs import replace

from rwkv_batch.runner import backends
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.pool import savepoints
from rwkv_batch.wire.commands import DeleteSession, ForkSession, RewindSession, SessionHistory
from rwkv_batch.wire.protocol import CommandReply, Event, Progress, Rejected, Sampling

pytestmark = pytest.mark.thorough

VOCAB = range(400)


def drawn_from(ids: range) -> Sampling:
    return Sampling(temperature=1.5, logit_bias=dict.fromkeys(sorted(set(VOCAB) - set(ids)), -100.0))


ASCII = drawn_from(range(1, 129))
LETTERS = drawn_from(range(98, 102))  # "a" to "d", of which stop strings of several tokens come often
STOPS = [
    (ASCII, ["a", "e!", "\x10", "\x11\x12", "b", "3 "]),
    (LETTERS, ["ab", "dda", "cbd", "acac", "bb"]),
]
KEYS = "abcdef"
NEXT = [33]  # a turn that shows what the session's state is


class Mixed:
    """An engine with room for a few states, and what is asked of it."""

    def __init__(self, rng: Random, folder: Path) -> None:
        self.rng, self.asked = rng, dict[str, list[Event]]()  # turns that have not been cancelled
        store = Store(folder / "sessions.db") if rng.random() < 0.5 else None
        rows, idle, host = rng.choice([1, 2, 3, 5]), rng.choice([0, 1, 2, 4, 8, 12]), rng.choice([0, 1, 2, 8])
        self.driver = Driver(store, max_rows=rows, l1=idle, l2=host, prefix_cache_mb=rng.choice([0, 16]))

    def command(self, kind: type, *fields: object) -> Event:
        asked = kind("command", *fields)
        self.driver.events.pop(asked.id, None)
        self.driver.engine.command((b"test", asked.id), asked)
        return self.driver.until(asked.id, (CommandReply, Rejected))[-1]

    def act(self) -> None:
        """Any one thing."""
        rng, key, other = self.rng, *self.rng.choices(KEYS, k=2)
        match rng.choices(("turn", "steps", "cancel", "delete", "fork", "rewind"), (45, 30, 10, 5, 5, 5))[0]:
            case "turn":
                prompt = rng.choices(range(20, 300), k=rng.choice([1, 2, 5, 40]))
                sampling, stops = rng.choice(STOPS)
                name = self.driver.add(
                    prompt,
                    key,
                    max_tokens=rng.choice([0, 1, 5, 40, 100]),
                    stop_strings=rng.choices(stops, k=rng.choice([0, 1, 2])),
                    stop_ids=rng.choice([[], [60, 61, 62]]),
                    sampling=replace(sampling, seed=rng.getrandbits(40)),
                    flush_tokens=rng.choice([1, 5]),
                )
                self.asked[name] = self.driver.events.setdefault(name, [])
            case "steps":
                for _ in range(rng.choice([1, 3, 10, 40])):
                    self.driver.step()
            case "cancel" if self.asked:
                name = rng.choice(sorted(self.asked))
                del self.asked[name]
                self.driver.engine.cancel((b"test", name))
            case "delete":
                self.command(DeleteSession, key)
            case "fork":
                self.command(ForkSession, key, other, None, rng.random() < 0.5)
            case "rewind":
                self.command(RewindSession, key, rng.choice([0, 1, 2]))

    def finish(self) -> None:
        for name in self.asked:
            self.driver.until(name, (Progress, Rejected))

    def tokens(self, key: str) -> list[int]:
        """Of the session's turns; none if there is no such session."""
        reply = self.command(SessionHistory, key)
        turns = reply.turns if isinstance(reply, CommandReply) else []
        return [token for turn in turns for token in turn.prompt_tokens + turn.completion_tokens]

    def all_slots_are_free(self) -> bool:
        engine = self.driver.engine
        return free_slots(engine.scheduler) == len(engine.runner.states)


@pytest.mark.parametrize("runner", [None, LateRunner, SeveralRunner])
@pytest.mark.parametrize("seed", range(6))
def test_each_session_goes_on_from_its_tokens(seed, runner, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(savepoints, "WORTHWHILE", 0.0)
    monkeypatch.setattr(savepoints, "LEAST_TOKENS", (1, 2, 4, 8)[seed % 4])
    plain = Driver(l1=0, l2=0, max_rows=1)
    if runner:
        monkeypatch.setattr(backends, "TorchRunner", runner)
        without_time(monkeypatch)
    mixed = Mixed(Random(f"{seed} {runner}"), tmp_path)
    for _ in range(60):
        mixed.act()
    mixed.finish()
    fields = {"max_tokens": 12, "sampling": replace(ASCII, seed=5)}
    for key in KEYS:
        if tokens := mixed.tokens(key):
            expected = plain.say(tokens + NEXT, **fields)
            assert mixed.driver.say(NEXT, key, **fields) == expected
    for key in KEYS:
        mixed.command(DeleteSession, key)
    while not mixed.all_slots_are_free():  # what is being copied is not
        assert mixed.driver.woken.wait(60), "a slot has been lost"
        mixed.driver.step()
    for driver in (plain, mixed.driver):
        driver.engine.close()
