"""Start states with a time_offset: their rows are scaled at every token, wherever their states come from."""

from pathlib import Path

import pytest
import torch
from engine_driver import PROMPTS, WEIGHTS, Driver
from plain_rwkv7 import plain_logits
from row_adapters import write

from rwkv_batch.state.log.store import Store
from rwkv_batch.state.starts.start_states import OFFSETS
from rwkv_batch.wire.commands import (
    ForkSession,
    ListStartStates,
    LoadAdapter,
    PutStartState,
    RemoveDocument,
    RemoveStartStates,
)
from rwkv_batch.wire.protocol import CommandReply, MixturePart, Rejected, Sampling

pytestmark = pytest.mark.thorough

GREEDY = Sampling(temperature=0)
LONG = [(7 * i) % 390 + 1 for i in range(300)]  # long enough for the prefix cache


def numbers(seed: int, offsets: bool = True) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    found = {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}
    if offsets:
        found |= {f"blocks.{i}.att.time_offset": torch.randn(128, generator=draw) for i in range(2)}
    return found


def stacked(seed: int, name: str) -> torch.Tensor:
    return torch.stack([numbers(seed)[f"blocks.{i}.att.{name}"] for i in range(2)])


def put(driver: Driver, folder: Path, seed: int, name: str = "", **options) -> CommandReply | Rejected:
    """Store a state, "s<seed>" if it has no other name."""
    path = folder / f"{seed}{options}.pth"
    torch.save(numbers(seed, **options), path)
    command = PutStartState(f"put {name} {path}", name or f"s{seed}", str(path), "vk", b"")
    driver.engine.command((b"test", command.id), command)
    return driver.until(command.id, (CommandReply, Rejected))[-1]


def engine(store: Store | None = None, **options) -> Driver:
    return Driver(store, **{"max_adapters": 2, "max_rows": 4} | options)


def said(driver: Driver, prompt: list[int], session: str | None = None, **fields) -> tuple[str, int]:
    return driver.say(prompt, session, sampling=GREEDY, max_tokens=8, stop_ids=[], **fields)


def drawn(prompt: list[int], *seeds: int) -> list[int]:
    """What follows in fp64 from the formulas. seeds: of the state; of none: the zero state."""
    fed = list(prompt)
    for _ in range(8):
        fed.append(int(logits_of(fed, *seeds).argmax()))
    return fed[len(prompt) :]


def logits_of(tokens: list[int], *seeds: int) -> torch.Tensor:
    state = {"offsets": stacked(*seeds, "time_offset"), "wkv": stacked(*seeds, "time_state")} if seeds else {}
    return plain_logits(dict(WEIGHTS.tensors), tokens, **state)


def text(driver: Driver, tokens: list[int]) -> tuple[str, int]:
    return driver.engine.tokenizer.decode(tokens), len(tokens)


def refused(driver: Driver, session: str | None = None, **fields) -> Rejected:
    (*_, event) = driver.until(driver.add(PROMPTS[0], session, **fields), (Rejected,))
    assert isinstance(event, Rejected), event
    assert event.message.endswith(".") and "\n" not in event.message
    return event


def test_rows_of_one_step_are_scaled_each_by_its_own(tmp_path: Path) -> None:
    driver = engine()
    for seed in (1, 2):
        assert isinstance(put(driver, tmp_path, seed), CommandReply)
    cases = [(prompt, seeds) for prompt in PROMPTS for seeds in ([1], [], [2])]
    fields = {"sampling": GREEDY, "max_tokens": 8, "stop_ids": []}
    names = ["".join(f"s{seed}" for seed in seeds) for _, seeds in cases]
    requests = [
        driver.add(case[0], start_state=name, **fields) for case, name in zip(cases, names, strict=True)
    ]
    for (prompt, seeds), request in zip(cases, requests, strict=True):
        assert driver.said(request) == text(driver, drawn(prompt, *seeds)), (prompt, seeds)


def test_states_that_differ_in_their_offsets_alone_are_different(tmp_path: Path) -> None:
    driver, uncached = engine(prefix_cache_mb=8), engine()
    for each in (driver, uncached):
        put(each, tmp_path, 1)
        put(each, tmp_path, 1, "unscaled", offsets=False)
    names = ["", "s1", "unscaled"]
    expected = [said(uncached, LONG, start_state=name) for name in names]
    assert expected[1] != expected[2]
    for _ in range(3):  # from the third on, all but the end is cached
        assert [said(driver, LONG, start_state=name) for name in names] == expected


@pytest.mark.parametrize("options", [{"l1": 4}, {"l1": 0, "l2": 4}, {"l1": 0, "l2": 0}, {"token_log": False}])
def test_a_conversation_goes_on_wherever_its_state_is(tmp_path: Path, options) -> None:
    driver = engine(Store(tmp_path / "sessions.db"), **options)
    put(driver, tmp_path, 1)
    history: list[int] = []
    for prompt in PROMPTS:
        history += prompt
        wanted = drawn(history, 1)
        assert said(driver, prompt, "a", start_state="s1") == text(driver, wanted)
        history += wanted
    driver.engine.close()


def test_it_is_there_after_a_restart_and_sessions_go_on(tmp_path: Path) -> None:
    whole = engine(l1=4)
    put(whole, tmp_path, 1)
    expected = [said(whole, prompt, "a", start_state="s1") for prompt in PROMPTS[:2]]
    driver = engine(Store(tmp_path / "sessions.db"))
    put(driver, tmp_path, 1)
    assert said(driver, PROMPTS[0], "a", start_state="s1") == expected[0]
    driver.engine.close()
    driver = engine(Store(tmp_path / "sessions.db"), l1=0, l2=0)
    assert said(driver, PROMPTS[1], "a", start_state="s1") == expected[1]
    driver.engine.close()
    driver = engine(Store(tmp_path / "sessions.db"), max_adapters=0)  # which has no room for it
    assert "--max-adapters" in refused(driver, start_state="s1").message
    assert said(driver, PROMPTS[0]) == said(engine(), PROMPTS[0])
    driver.engine.close()


def test_a_session_belongs_to_it(tmp_path: Path) -> None:
    driver = engine()
    for seed in (1, 2):
        put(driver, tmp_path, seed)
    said(driver, PROMPTS[0], "scaled", start_state="s1")
    said(driver, PROMPTS[0], "plain")
    assert "time_offset" in refused(driver, "scaled").message
    assert refused(driver, "scaled", start_state="s2").reason == "conflict"
    assert refused(driver, "plain", start_state="s1").reason == "conflict"
    driver.ask(ForkSession("fork", "scaled", "fork"))
    assert refused(driver, "fork").reason == "conflict"
    again = said(driver, PROMPTS[1], "scaled", start_state="s1")
    assert again == said(driver, PROMPTS[1], "fork", start_state="s1")


def test_what_runs_in_it_goes_on_after_it_is_removed_or_replaced(tmp_path: Path) -> None:
    driver, expected = engine(max_rows=1), engine()
    for each in (driver, expected):
        put(each, tmp_path, 1)
    running = driver.add(PROMPTS[0], start_state="s1", sampling=GREEDY, max_tokens=8, stop_ids=[])
    driver.step()
    put(driver, tmp_path, 2, "s1")
    assert driver.said(running) == said(expected, PROMPTS[0], start_state="s1")
    put(expected, tmp_path, 2)
    assert said(driver, PROMPTS[0], start_state="s1") == said(expected, PROMPTS[0], start_state="s2")
    assert driver.ask(RemoveStartStates("remove")).found == 1
    assert refused(driver, start_state="s1").reason == "not_found"


def test_states_that_share_their_offsets_do_not_lose_them(tmp_path: Path) -> None:
    driver = engine(Store(tmp_path / "sessions.db"))
    put(driver, tmp_path, 1)
    put(driver, tmp_path, 1, "twin")
    expected = said(driver, PROMPTS[0], start_state="twin")
    driver.ask(RemoveStartStates("remove", name="s1"))
    driver.engine.close()
    driver = engine(Store(tmp_path / "sessions.db"))
    assert said(driver, PROMPTS[0], start_state="twin") == expected
    driver.engine.close()


def test_one_whose_offsets_are_lost_is_not_offered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = engine(Store(tmp_path / "sessions.db"))
    put(driver, tmp_path, 1)
    (key,) = driver.engine.pool.store.document_keys(OFFSETS)
    driver.ask(RemoveDocument("remove", key))
    driver.engine.close()
    driver = engine(Store(tmp_path / "sessions.db"))
    assert driver.ask(ListStartStates("list")).start_states == []
    assert "The start state s1 is lost: its time_offset is missing" in caplog.text
    driver.engine.close()


def test_a_mixture_of_states_that_are_scaled_and_not(tmp_path: Path) -> None:
    driver = engine()
    for seed in (1, 2):
        put(driver, tmp_path, seed)
    mixture, fed = [MixturePart("s1", 0.25), MixturePart("s2", 0.25), MixturePart("", 0.5)], list(PROMPTS[0])
    for _ in range(8):
        mixed = 0.25 * logits_of(fed, 1) + 0.25 * logits_of(fed, 2) + 0.5 * logits_of(fed)
        fed.append(int(mixed.argmax()))
    expected = text(driver, fed[len(PROMPTS[0]) :])
    assert said(driver, PROMPTS[0], mixture=mixture) == expected
    assert said(driver, PROMPTS[0], "a", mixture=mixture) == expected


def test_what_cannot_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    without = Driver()
    reply = put(without, tmp_path, 1)
    assert isinstance(reply, Rejected) and reply.reason == "invalid" and "--max-adapters" in reply.message
    driver = engine()
    put(driver, tmp_path, 1)
    file = write(tmp_path, WEIGHTS, "lora", 1)
    driver.ask(LoadAdapter("load", "lora", str(file), scaling=1.0))
    assert "merge the adapter" in refused(driver, start_state="s1", adapter="lora").message
