"""Adapters of requests: every row says what a model says that has its adapter merged by hand."""

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch
from adapter_files import FACTOR
from checkpoints import write_pth
from engine_driver import PROMPTS, WEIGHTS, Driver
from row_adapters import KINDS, SCALED, changes, merged_by_hand, write

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.state.exported import What
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.codec import decode_paused
from rwkv_batch.wire.commands import (
    PAUSED,
    ExportSession,
    ForkSession,
    GetDocument,
    ListAdapters,
    LoadAdapter,
    PauseRequest,
    PutStartState,
    RemoveAdapter,
    RewindSession,
)
from rwkv_batch.wire.protocol import (
    CommandReply,
    Failed,
    GenerateRequest,
    MixturePart,
    Progress,
    Rejected,
    Sampling,
)

GREEDY = Sampling(temperature=0)
LONG = [(7 * i) % 390 + 1 for i in range(300)]  # long enough for the prefix cache
NUMBERS = itertools.count()


@cache
def merged(kind: str, seed: int) -> Checkpoint:
    return merged_by_hand(WEIGHTS, kind, seed)


@pytest.fixture
def driver(engines: list[Driver]):
    def make(weights: Checkpoint = WEIGHTS, **options) -> Driver:
        engines.append(Driver(weights=weights, **{"max_adapters": 4, "max_rows": 4} | options))
        return engines[-1]

    return make


def load(driver: Driver, name: str, path: Path, factor: float | None = FACTOR) -> CommandReply | Rejected:
    id_ = f"load {next(NUMBERS)}"
    driver.engine.command((b"test", id_), LoadAdapter(id_, name, str(path), scaling=factor))
    return driver.until(id_, (CommandReply, Rejected))[-1]


def load_kind(driver: Driver, folder: Path, kind: str, seed: int) -> str:
    """Its name."""
    name = f"{kind}{seed}"
    reply = load(driver, name, write(folder, WEIGHTS, kind, seed), FACTOR if kind in SCALED else None)
    assert isinstance(reply, CommandReply), reply
    return name


def said(driver: Driver, prompt: list[int], **fields) -> tuple[str, int]:
    return driver.say(prompt, sampling=GREEDY, max_tokens=12, **fields)


def test_rows_with_different_adapters_and_without_run_together(driver, tmp_path: Path) -> None:
    served = driver(max_rows=8)
    wanted = {load_kind(served, tmp_path, kind, 1): driver(merged(kind, 1)) for kind in KINDS}
    wanted[""] = driver()
    names = {
        (name, place): served.add(prompt, sampling=GREEDY, max_tokens=12, adapter=name)
        for place, prompt in enumerate((*PROMPTS, LONG))
        for name in wanted
    }
    texts = set()
    for (name, place), request in names.items():
        text = served.said(request)
        assert text == said(wanted[name], (*PROMPTS, LONG)[place]), (name, place)
        texts.add((place, text))
    assert len(texts) > 2 * (len(PROMPTS) + 1)  # they do say different things


def test_more_adapters_than_slots(driver, tmp_path: Path) -> None:
    served = driver(max_adapters=2, max_rows=3, adapter_cache_mb=0)  # all but one are read again and again
    names = [load_kind(served, tmp_path, "lora", seed) for seed in range(4)]
    requests = [
        (seed, served.add(prompt, sampling=GREEDY, max_tokens=12, adapter=names[seed]))
        for prompt in PROMPTS
        for seed in range(4)
    ]
    plain = [served.add(prompt, sampling=GREEDY, max_tokens=12) for prompt in PROMPTS]
    models = [driver(merged("lora", seed)) for seed in range(4)]
    for (seed, request), prompt in zip(requests, [p for p in PROMPTS for _ in range(4)], strict=True):
        assert served.said(request) == said(models[seed], prompt)
    unchanged = driver()
    assert [served.said(name) for name in plain] == [said(unchanged, prompt) for prompt in PROMPTS]


def test_a_row_without_an_adapter_does_not_wait_for_a_slot(driver, tmp_path: Path) -> None:
    served = driver(max_adapters=1, max_rows=4)
    first, second = (load_kind(served, tmp_path, "lora", seed) for seed in (1, 2))
    long = served.add(PROMPTS[0], adapter=first, max_tokens=40, stop_ids=[])
    waiting = served.add(PROMPTS[0], adapter=second, max_tokens=2)
    behind = served.add(PROMPTS[0], adapter=first, max_tokens=2)  # or the second one might never come
    served.said(served.add(PROMPTS[1], max_tokens=3))
    served.step()
    assert not served.text(waiting) and not served.text(behind)
    order = []
    for name in (long, waiting, behind):
        order.append(served.said(name)[1])
    assert order == [40, 2, 2]


def test_rows_of_batches_keep_slots_that_a_row_without_its_adapter_could_not_use(driver, tmp_path) -> None:
    served = driver(max_adapters=1, max_rows=2)
    first, second = (load_kind(served, tmp_path, "lora", seed) for seed in (1, 2))
    long = served.add(PROMPTS[0], adapter=first, max_tokens=40, stop_ids=[])
    batch = served.add(PROMPTS[1], batch=True, max_tokens=10, stop_ids=[])
    waiting = served.add(PROMPTS[0], adapter=second, max_tokens=2)
    assert served.said(batch)[1] == 10
    assert served.engine.counts.waits.preemptions == 0 and not served.text(waiting)
    assert [served.said(name)[1] for name in (long, waiting)] == [40, 2]


def test_a_row_of_a_batch_leaves_its_adapter_too(driver, tmp_path) -> None:
    served = driver(max_adapters=1, max_rows=1)
    first, second = (load_kind(served, tmp_path, "lora", seed) for seed in (1, 2))
    batch = served.add(PROMPTS[1], adapter=first, batch=True, max_tokens=40, flush_tokens=1, stop_ids=[])
    while not served.text(batch):
        served.step()
    assert served.said(served.add(PROMPTS[0], adapter=second, max_tokens=2))[1] == 2
    assert served.engine.counts.waits.preemptions == 1
    assert served.said(batch)[1] == 40


def test_cached_prefixes_of_different_adapters_are_different(driver, tmp_path: Path) -> None:
    served = driver(prefix_cache_mb=16)
    names = ["", *(load_kind(served, tmp_path, "lora", seed) for seed in (1, 2)), ""]
    models = {"": driver(), "lora1": driver(merged("lora", 1)), "lora2": driver(merged("lora", 2))}
    for _ in range(3):
        for name in names:
            assert said(served, LONG, adapter=name) == said(models[name], LONG)


@pytest.mark.parametrize("options", [{"l1": 4}, {"l1": 0, "l2": 4}, {"l1": 0, "l2": 0}])
def test_a_conversation_goes_on_with_its_adapter_wherever_its_state_is(
    driver, tmp_path: Path, options
) -> None:
    served = driver(store=Store(tmp_path / "sessions.db"), **options)
    name = load_kind(served, tmp_path, "lora", 1)
    expected = driver(merged("lora", 1), l1=4)
    for prompt in PROMPTS:
        assert said(served, prompt, session="a", adapter=name) == said(expected, prompt, session="a")


def test_after_a_restart_a_session_wants_its_adapter_again(driver, tmp_path: Path) -> None:
    before = driver(store=Store(tmp_path / "sessions.db"))
    name = load_kind(before, tmp_path, "lora", 1)
    expected = driver(merged("lora", 1))
    assert said(before, PROMPTS[0], session="a", adapter=name) == said(expected, PROMPTS[0], session="a")
    before.engine.close()
    after = driver(store=Store(tmp_path / "sessions.db"))
    assert refused(after, session="a", adapter=name).reason == "not_found"
    assert refused(after, session="a").reason == "conflict"
    load_kind(after, tmp_path, "lora", 2)
    assert refused(after, session="a", adapter="lora2").reason == "conflict"
    assert load(after, "other name", tmp_path / "lora-1.pth").adapters
    again = said(after, PROMPTS[1], session="a", adapter="other name")
    assert again == said(expected, PROMPTS[1], session="a")


def refused(driver: Driver, session: str | None = None, **fields) -> Rejected:
    request = driver.add(PROMPTS[0], session, **fields)
    (*_, event) = driver.until(request, (Rejected, Progress))
    assert isinstance(event, Rejected), event
    assert event.message.endswith(".") and "\n" not in event.message
    return event


def test_a_session_belongs_to_its_adapter(driver, tmp_path: Path) -> None:
    served, expected = driver(), driver(merged("lora", 1))
    name = load_kind(served, tmp_path, "lora", 1)
    said(served, PROMPTS[0], session="plain")
    said(served, PROMPTS[0], session="adapted", adapter=name)
    assert refused(served, "plain", adapter=name).reason == "conflict"
    assert refused(served, "adapted").reason == "conflict"
    served.ask(ForkSession("fork", "adapted", "fork"))
    assert refused(served, "fork").reason == "conflict"
    said(expected, PROMPTS[0], session="a")
    assert said(served, PROMPTS[1], session="fork", adapter=name) == said(expected, PROMPTS[1], session="a")
    assert "adapter" in no_export(served, "adapted", "state")


def no_export(served: Driver, key: str, what: What) -> str:
    """Why a session cannot be exported like that, which is no failure of the server."""
    served.engine.command((b"test", "x"), ExportSession("x", key, what=what))
    (*_, event) = served.until("x", (Failed, Rejected, CommandReply))
    assert isinstance(event, Rejected) and event.reason == "conflict"
    return event.message


def test_a_session_whose_tokens_are_not_stored_belongs_to_its_adapter_too(driver, tmp_path: Path) -> None:
    served = driver(store=Store(tmp_path / "sessions.db"), token_log=False)
    name = load_kind(served, tmp_path, "lora", 1)
    said(served, PROMPTS[0], session="adapted", adapter=name)
    assert refused(served, "adapted").reason == "conflict"
    assert "with its state" in no_export(served, "adapted", "tokens")
    expected = driver(merged("lora", 1))
    said(expected, PROMPTS[0], session="a")
    assert said(served, PROMPTS[1], session="adapted", adapter=name) == said(
        expected, PROMPTS[1], session="a"
    )


def test_start_states_and_mixtures_run_with_an_adapter(driver, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    tuned = {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}
    file = write_pth(tmp_path / "state.pth", tuned)
    served, expected = driver(), driver(merged("lora", 1))
    name = load_kind(served, tmp_path, "lora", 1)
    for each in (served, expected):
        each.ask(PutStartState("put", "tuned", str(file), "vk", b""))
    both = [MixturePart("tuned", 1.0), MixturePart("", 1.0)]
    for fields in ({"start_state": "tuned"}, {"mixture": both}, {"start_state": "tuned", "session": "a"}):
        assert said(served, PROMPTS[2], adapter=name, **fields) == said(expected, PROMPTS[2], **fields)
    for each in (served, expected):
        assert each.ask(RewindSession("rewind", "a", 0)).position == 0
    again = said(served, PROMPTS[1], session="a", adapter=name)
    assert again == said(expected, PROMPTS[1], session="a")


def test_an_adapter_that_is_unloaded_ends_with_its_rows(driver, tmp_path: Path) -> None:
    served, expected = driver(max_rows=1, max_adapters=1), driver(merged("lora", 1))
    name = load_kind(served, tmp_path, "lora", 1)
    running = served.add(PROMPTS[0], adapter=name, sampling=GREEDY, max_tokens=12)
    waiting = served.add(PROMPTS[1], adapter=name, sampling=GREEDY, max_tokens=12)
    served.step()
    assert served.ask(RemoveAdapter("remove", name)).found == 1
    assert served.ask(RemoveAdapter("remove", name)).found == 0
    assert refused(served, adapter=name).reason == "not_found"
    assert load(served, name, write(tmp_path, WEIGHTS, "lora", 2)).adapters  # another one of the name
    assert served.said(running) == said(expected, PROMPTS[0])
    assert served.said(waiting) == said(expected, PROMPTS[1])
    assert said(served, PROMPTS[0], adapter=name) == said(driver(merged("lora", 2)), PROMPTS[0])


def test_a_paused_request_goes_on_with_the_adapter_that_it_began_with(driver, tmp_path: Path) -> None:
    served, expected = driver(), driver(merged("lora", 1))
    name = load_kind(served, tmp_path, "lora", 1)
    request = served.add(
        PROMPTS[0], adapter=name, sampling=GREEDY, max_tokens=12, name="tale", flush_tokens=1
    )
    for _ in range(4):
        served.step()
    served.ask(PauseRequest("pause", "tale"))
    first = served.said(request)[0]
    paused = decode_paused(served.ask(GetDocument("get", PAUSED + "tale")).data)
    served.engine.add((b"test", "again"), _with_id(paused, "again"))
    assert first + served.said("again")[0] == said(expected, PROMPTS[0])[0]
    served.ask(RemoveAdapter("remove", name))
    load(served, name, write(tmp_path, WEIGHTS, "lora", 2))
    served.engine.add((b"test", "third"), _with_id(paused, "third"))
    (event,) = served.until("third", (Rejected,))
    assert (
        isinstance(event, Rejected) and event.reason == "not_found" and "is not what it was" in event.message
    )


def _with_id(request: GenerateRequest, id_: str) -> GenerateRequest:
    from msgspec.structs import replace

    return replace(request, id=id_)


def test_a_file_that_changes_while_it_is_not_in_memory(driver, tmp_path: Path) -> None:
    served = driver(max_adapters=1, adapter_cache_mb=0)
    first, second = (load_kind(served, tmp_path, "lora", seed) for seed in (1, 2))
    write_pth(tmp_path / "lora-1.pth", changes(WEIGHTS, "lora", 5))
    failing = served.add(PROMPTS[0], adapter=first)
    other = served.add(PROMPTS[0], adapter=second, sampling=GREEDY, max_tokens=12)
    (*_, event) = served.until(failing, (Failed,))
    assert isinstance(event, Failed) and "has changed since it was loaded" in event.message
    assert served.said(other) == said(driver(merged("lora", 2)), PROMPTS[0])


def test_what_is_loaded_is_listed(driver, tmp_path: Path) -> None:
    served = driver()
    names = [load_kind(served, tmp_path, "lora", 1), load_kind(served, tmp_path, "miss", 1)]
    listed = served.ask(ListAdapters("list")).adapters
    assert [(info.name, info.rank) for info in listed] == list(zip(names, (4, 12), strict=True))
    assert listed[0].digest != listed[1].digest
    assert [info.name for info in served.ask(ListAdapters("one", names[1])).adapters] == names[1:]
    message = refused(served, adapter="none").message
    assert "lora1, miss1" in message


def test_what_cannot_be_an_adapter_of_requests_is_refused_in_a_sentence(driver, tmp_path: Path) -> None:
    served = driver(max_adapter_rank=8)
    good = changes(WEIGHTS, "lora", 1)
    renamed = {name.replace("blocks.1.att.key.", "blocks.1.att.kee."): t for name, t in good.items()}
    whole = {"head.weight": WEIGHTS.tensors["head.weight"].float()}
    files = {
        "blocks.1.att.kee": renamed,
        "DoRA": good | {"blocks.0.att.key.lora_M": torch.ones(1, 128)},
        "Bone": {"blocks.0.att.key.bone": torch.zeros(8, 16, 16)},
        "only att.receptance, att.key": whole,
        "--max-adapter-rank 24": changes(WEIGHTS, "disha", 1),
    }
    for text, tensors in files.items():
        reply = load(served, "a", write_pth(tmp_path / "bad.pth", tensors))
        assert isinstance(reply, Rejected) and reply.reason == "invalid" and text in reply.message
        assert reply.message.endswith(".") and "\n" not in reply.message
        assert any(way in reply.message for way in ("--", "`adapter_filename`", "kee"))  # what to do
    path = write_pth(tmp_path / "good.pth", good)
    assert "adapter_alpha" in load(served, "a", path, None).message
    assert "max-adapters" in load(driver(max_adapters=0), "a", path).message
    assert load(served, "a", path).adapters
    assert load(served, "a", path).reason == "exists"
    assert "There is no adapter" in load(served, "b", tmp_path / "missing.pth").message
    assert refused(served, "s", adapter="b").reason == "not_found"
