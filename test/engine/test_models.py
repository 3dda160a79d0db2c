"""Several models in one process: which one a request is for, what they share, and what they do not."""

from dataclasses import replace

import pytest
import torch
from checkpoints import tiny
from models_driver import PROMPT, WEIGHTS, ModelsDriver, alone
from row_adapters import merged_by_hand, write

from app import parse
from rwkv_batch.engine import memory
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.memory import MemoryShare
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops import device
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner import torch_runner
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.commands import ListModels, ListSessions, LoadAdapter, SessionHistory
from rwkv_batch.wire.protocol import (
    Accepted,
    CommandReply,
    Failed,
    Progress,
    Rejected,
    Sampling,
    SessionTurn,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: alone(PROMPT, weights) for name, weights in WEIGHTS.items()}


def test_each_request_is_answered_by_its_model(texts):
    driver = ModelsDriver("one", "two")
    wanted = ["one", "two", "", "two", "one"]
    ids = [driver.add(model) for model in wanted]
    driver.finish(*ids)
    assert [driver.text(id_) for id_ in ids] == [texts[model or "one"] for model in wanted]
    assert texts["one"] != texts["two"]
    for id_, model in zip(ids, wanted, strict=True):
        accepted = driver.events[id_][0]
        assert isinstance(accepted, Accepted)
        assert accepted.fingerprint == WEIGHTS[model or "one"].fingerprint


def test_a_turn_that_is_cancelled_has_one_last_event_which_says_whether_it_is_stored():
    """Whoever counts its tokens has as many as the database, however far it was."""
    driver, kinds = ModelsDriver("one"), set()
    for steps in range(12):
        session = f"s{steps}"
        id_ = driver.add("one", max_tokens=5, turn=SessionTurn(session, session), flush_tokens=1)
        for _ in range(steps):
            if driver.models.busy:
                driver.step()
        driver.models.cancel((b"test", id_), closes=not driver.ended(id_))
        driver.finish(id_)
        while driver.models.busy:
            driver.step()
        history = driver.ask(SessionHistory(f"history {session}", session, to_model="one"))
        events = driver.events[id_]
        tokens = sum(row.tokens for each in events if isinstance(each, Progress) for row in each.rows)
        kinds.add(kind := type(events[-1]))
        if isinstance(history, CommandReply):
            assert kind is Progress and len(history.turns[0].completion_tokens) == tokens == 5
        else:
            assert kind is Failed and tokens < 5
    assert kinds == {Progress, Failed}


def test_a_name_that_is_not_served_is_rejected_with_those_that_are():
    driver = ModelsDriver("one", "two")
    id_ = driver.add("three")
    driver.finish(id_)
    (event,) = driver.events[id_]
    assert isinstance(event, Rejected) and event.reason == "not_found"
    assert "three" in event.message and "one, two" in event.message


def test_what_is_served_is_listed_with_the_default_first():
    driver = ModelsDriver("two", "one")
    reply = driver.ask(ListModels("l"))
    assert isinstance(reply, CommandReply)
    assert [(info.model, info.fingerprint) for info in reply.models] == [
        (name, WEIGHTS[name].fingerprint) for name in ("two", "one")
    ]
    assert reply.models[0].checkpoint == WEIGHTS["two"].name


def test_sessions_of_a_name_are_different_ones_in_each_model(tmp_path):
    driver = ModelsDriver("one", "two", folder=tmp_path)
    turn = SessionTurn(source="s", target="s")
    first = driver.add("one", turn=turn)
    driver.finish(first)
    found = [driver.ask(ListSessions(name, to_model=name)) for name in ("one", "two")]
    assert [[s.key for s in reply.sessions] for reply in found if isinstance(reply, CommandReply)] == [
        ["s"],
        [],
    ]
    driver.models.close()


def test_a_cancelled_request_leaves_the_other_models_alone(texts):
    driver = ModelsDriver("one", "two")
    gone, stays = driver.add("one", max_tokens=1000), driver.add("two")
    driver.step()
    driver.models.cancel((b"test", gone))
    driver.finish(stays)
    assert driver.text(stays) == texts["two"]
    assert not driver.models.busy


def test_a_small_model_does_not_take_the_threads_of_a_large_one(monkeypatch):
    small = TorchRunner(tiny(), device.find_devices("cpu"), torch.float32)
    monkeypatch.setattr(torch_runner, "SMALL", 0)
    large = TorchRunner(tiny(), device.find_devices("cpu"), torch.float32)
    threads = []
    for runner in (small, large):
        runner.allocate(1, 0, 16)
    for runner in (small, large, small):
        runner.run(Batch([5], [1], [0], []))
        threads.append(torch.get_num_threads())
    assert threads == [1, torch_runner.THREADS, 1]


def test_steps_take_the_threads_asked_for_and_texts_stay_the_same():
    before, texts = torch.get_num_threads(), []
    for count in (1, 2):
        engine = Engine(
            tiny(vocab=65536), device="cpu", threads=parse(["--threads", str(count)]).engines[0].threads
        )
        (row,) = engine.generate(["Hello"], max_tokens=8, stop_ids=[], sampling=Sampling(temperature=0))
        texts.append(row.text)
        assert torch.get_num_threads() == count
        engine.close()
    torch.set_num_threads(before)
    assert texts[0] == texts[1]


def test_a_share_of_the_device_is_that_part_of_what_is_free(free_memory):
    runner = TorchRunner(tiny(), device.find_devices("cpu"), torch.float32)

    def rows(free: int, share: MemoryShare = memory.WHOLE) -> int:
        free_memory(free)
        return memory.rows_that_fit(runner, None, 0, 16, share)

    small = rows(2 * MIB)
    assert 1 < rows(4 * MIB, MemoryShare(device=2)) == small < rows(4 * MIB)
    assert rows(6 * MIB, MemoryShare(device=2, kept=2 * MIB)) == small
    free_memory(24 * MIB)
    assert memory.rows_that_fit(runner, 20, 0, 16, MemoryShare(device=2)) == 20, "as --max-rows says"


def test_weights_that_do_not_fit_beside_others_are_refused_before_they_are_loaded(monkeypatch):
    gpu, gib = torch.device("cuda", 0), 1 << 30
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20 * gib)
    monkeypatch.setattr(memory, "reserve_bytes", lambda device: gib)
    monkeypatch.setattr(memory, "describe", lambda device: "cuda:0")
    fits = int(9 * gib / (2 * memory.FILLED_UP))  # in fp16

    def check(parameters: int, device: torch.device, kept: int) -> None:
        memory.check_weights(replace(tiny(), name="x", parameters=parameters), device, kept)

    check(fits, gpu, kept=10 * gib)
    with pytest.raises(DeviceError, match=r"^The weights of x take 12.0 GiB, and 10.0 GiB .*\.$"):
        check(fits * 11 // 9, gpu, kept=10 * gib)
    check(fits * 100, torch.device("cpu"), kept=0)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_weights_in_fewer_bits_fit_where_those_in_16_do_not(name, monkeypatch):
    whole = tiny(width=512, vocab=4096)
    few = quantize(whole, name)
    gpu, free = torch.device("cuda", 0), 3 * whole.parameters // 2
    assert few.bytes_held(2) < 3 * whole.parameters // 2 < whole.bytes_held(2) == 2 * whole.parameters
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(memory, "reserve_bytes", lambda device: 0)
    monkeypatch.setattr(memory, "describe", lambda device: "cuda:0")
    memory.check_weights(few, gpu, kept=0)
    for refused in (whole, quantize(whole, "fp16")):
        with pytest.raises(
            DeviceError, match=rf"^The weights of {whole.name} take .*cuda:0; remove one, .*\.$"
        ):
            memory.check_weights(refused, gpu, kept=0)
    with pytest.raises(DeviceError, match=rf"^The weights of {whole.name} take .*\.$"):
        memory.check_weights(few, gpu, kept=whole.parameters)


def test_host_memory_and_disk_are_divided_by_all_models(tmp_path, monkeypatch):
    runner = TorchRunner(tiny(), device.find_devices("cpu"), torch.float32)
    runner.allocate(1, 0, 16)
    state = runner.states.shape.nbytes
    monkeypatch.setattr(memory, "host_bytes", lambda: 8 * 300 * state)
    assert [memory.host_states(runner.states, MemoryShare(host=n)) for n in (1, 2, 3)] == [300, 150, 100]
    usage = memory.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=1200))
    assert memory.database_limit(tmp_path / "s.db", 0, MemoryShare(host=3)) == 200
    assert memory.database_limit(tmp_path / "s.db", 500, MemoryShare(host=3)) == 500


def test_each_model_has_adapters_of_its_own(tmp_path):
    """With room for one at a time, and none in host memory: they are read again while the models are idle."""
    driver = ModelsDriver("one", "two", max_adapters=1, adapter_cache_mb=0)
    expected = {}
    for name, weights in WEIGHTS.items():
        for seed in (1, 2):
            path = write(tmp_path, weights, "disha", seed).rename(tmp_path / f"{name}-{seed}.pth")
            reply = driver.ask(LoadAdapter(f"{name}-{seed}", f"a{seed}", str(path), to_model=name))
            assert isinstance(reply, CommandReply), reply
            expected[name, seed] = alone(PROMPT, merged_by_hand(weights, "disha", seed))
    asked = [*expected, *reversed(expected)]
    ids = [driver.add(name, adapter=f"a{seed}") for name, seed in asked]
    driver.finish(*ids)
    assert [driver.text(id_) for id_ in ids] == [expected[key] for key in asked]
    assert len(set(expected.values())) == len(expected)
    driver.models.close()
