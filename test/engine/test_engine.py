"""The offline API, and what the engine does when a step goes wrong."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import write_pth
from msgspec import structs
from reference import Reference

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.wire.protocol import Accepted, Failed, GenerateRequest, Rejected, Sampling

PROMPTS = ["hello", "一二三四五 " * 30, "a b c d e f g", "x" * 100]
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pth(
        tmp_path_factory.mktemp("checkpoint") / "random.pth",
        random_checkpoint(layers=2, width=128, vocab=65536, seed=1),
    )


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return Engine(path, device="cpu", max_rows=3, prefill_tokens=32, max_waiting=8, l1=0, prefix_cache_mb=0)


def test_greedy_text_is_the_references(engine: Engine, path: Path):
    reference = Reference(path)
    results = engine.generate(PROMPTS, max_tokens=20, stop_ids=[], sampling=GREEDY)
    assert [r.text for r in results] == [reference.text(prompt, 20) for prompt in PROMPTS]
    assert {(r.tokens, r.finish_reason) for r in results} == {(20, "length")}


def test_a_seeded_row_draws_the_same_beside_any_others(engine: Engine):
    wild = Sampling(temperature=1.5, seed=11)
    alone = engine.generate(["hello"], max_tokens=12, stop_ids=[], sampling=wild, n=2)
    crowded = engine.generate(["hello", *PROMPTS], max_tokens=12, stop_ids=[], sampling=wild, n=2)[:2]
    assert [r.text for r in alone] == [r.text for r in crowded]
    assert alone[0].text != alone[1].text, "two rows of one request draw differently"


def test_an_engine_takes_a_configuration_or_its_fields(path: Path, tmp_path: Path):
    config = EngineConfig(
        device="cpu", max_rows=2, model_path=str(path), state_db=str(tmp_path / "sessions.db")
    )
    whole, fields = Engine(config=config), Engine(path, device="cpu", max_rows=2)
    measured = fields.info.step_seconds
    assert structs.replace(whole.info, step_seconds=measured) == fields.info
    assert [p.name for p in tmp_path.glob("*.db")] == ["sessions.db"], "only the database that was asked for"
    whole.close()
    for wrong in ({"config": config, "max_rows": 1}, {"max_row": 1}):
        with pytest.raises(TypeError, match="max_row"):
            Engine(path, **wrong)


def test_an_engine_that_cannot_start_leaves_its_database_to_the_next(path: Path, tmp_path: Path):
    database = str(tmp_path / "sessions.db")
    with pytest.raises(CheckpointError, match="nowhere"):
        Engine(tmp_path / "nowhere.pth", device="cpu", state_db=database)
    Engine(path, device="cpu", max_rows=1, state_db=database).close()


def test_token_ids_and_empty_prompts_are_prompts_too(engine: Engine):
    tokens = engine.tokenizer.encode(PROMPTS[0])
    text, empty, zero = (
        r.text for r in engine.generate([tokens, "", [0]], max_tokens=8, stop_ids=[], sampling=GREEDY)
    )
    assert text == engine.generate([PROMPTS[0]], max_tokens=8, stop_ids=[], sampling=GREEDY)[0].text
    assert empty == zero


def test_no_tokens_asked_for_is_no_text(engine: Engine):
    assert [(r.text, r.finish_reason) for r in engine.generate(["hello"], max_tokens=0)] == [("", "length")]


@pytest.mark.parametrize(
    "prompt, sampling, names",
    [
        ([70_000], GREEDY, "70000"),
        ([-1], GREEDY, "-1"),
        ("hello", Sampling(logit_bias={99_999: 1.0}), "logit_bias"),
        ("half \ud800", GREEDY, "surrogate"),
    ],
)
def test_what_the_model_cannot_read_is_named(
    engine: Engine, prompt: str | list[int], sampling: Sampling, names: str
):
    with pytest.raises(ValueError, match=names):
        engine.generate([prompt], sampling=sampling)
    assert not engine.busy
    engine.add((b"test", "bad"), GenerateRequest(id="bad", prompts=[prompt], max_tokens=1, sampling=sampling))
    [(key, event)] = engine.step()
    assert (
        key == (b"test", "bad")
        and isinstance(event, Rejected)
        and event.reason == "invalid"
        and names in event.message
    )


@pytest.mark.parametrize("wrong", [{"prompts": "a b"}, {"stop_strings": "User:"}, {"n": 0}])
def test_a_text_in_place_of_a_list_is_refused(engine: Engine, wrong: dict):
    with pytest.raises(ValueError, match="give"):
        engine.generate(**{"prompts": ["a"]} | wrong)


def test_an_option_that_there_is_not_is_named(engine: Engine):
    with pytest.raises(TypeError, match=r"no option top_p; it has .*sampling"):
        engine.generate(["a"], top_p=0.5)


def test_no_prompts_have_no_texts(engine: Engine):
    assert engine.generate([]) == []


def test_more_prompts_than_a_server_would_queue_are_all_continued(engine: Engine, capsys):
    alone = {
        text: engine.generate([text], max_tokens=4, stop_ids=[], sampling=GREEDY)[0].text for text in "ab"
    }
    assert not capsys.readouterr().err
    rows = engine.generate(["a", "b"] * 20, max_tokens=4, stop_ids=[], sampling=GREEDY, progress=True)
    assert "40/40" in capsys.readouterr().err
    assert [row.text for row in rows] == [alone["a"], alone["b"]] * 20


def test_calls_of_several_threads_have_their_own_rows(engine: Engine):
    prompts = [[f"{letter}{number}" for number in range(1 + index)] for index, letter in enumerate("abcd")]
    greedy = {"max_tokens": 8, "sampling": Sampling(temperature=0), "stop_ids": ()}
    alone = [[row.text for row in engine.generate(of_one, **greedy)] for of_one in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = threads.map(lambda of_one: [row.text for row in engine.generate(of_one, **greedy)], prompts)
    assert list(found) == alone


@pytest.mark.parametrize(("rows", "reason"), [(3 + 8, "overloaded"), (3 + 8 + 1, "invalid")])
def test_a_full_queue_refuses_for_now_and_a_request_that_never_fits_for_good(
    engine: Engine, rows: int, reason: str
):
    engine.add((b"test", "one"), GenerateRequest(id="one", prompts=["hello"], max_tokens=1))
    engine.add((b"test", "many"), GenerateRequest(id="many", prompts=["hello"] * rows, max_tokens=1))
    received = [event for _, event in engine.step() if isinstance(event, Rejected)]
    assert [(event.id, event.reason) for event in received] == [("many", reason)]
    engine.cancel((b"test", "one"))


def test_a_step_that_fails_ends_its_requests_and_the_rest_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    key = (b"test", "broken")
    engine.add(key, GenerateRequest(id="broken", prompts=["hello", "you"], max_tokens=5))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner.model, "forward", lambda *_: 1 / 0)
        events = engine.step()
    assert [type(event) for _, event in events] == [Accepted, Failed]
    assert isinstance(events[1][1], Failed) and "ZeroDivisionError" in events[1][1].message
    assert not engine.busy
    assert engine.generate(["hello"], max_tokens=3, stop_ids=[], sampling=GREEDY)[0].tokens == 3


def test_cancelled_rows_make_room_at_once(engine: Engine):
    for name in ("a", "b"):
        engine.add(
            (b"test", name),
            GenerateRequest(id=name, prompts=["hello"] * 3, max_tokens=10_000, sampling=GREEDY),
        )
    engine.step()
    engine.cancel((b"test", "a"))
    engine.step()
    assert {row.key[1] for row in engine.scheduler.running.values()} == {"b"}
    engine.cancel_frontend(b"test")
    assert not engine.busy
