"""A draft model on a GPU: its guesses, its few states, and engines that have one.

Under --emulated most of these tests run on a CPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import refusal, tiny
from cuda_gpu import DEVICE, needs_gpu
from engine_driver import Driver

from rwkv_batch.bundled import unpack
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import Engine
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.engine.speculation.cost import DraftCost, draft_cost
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.graphs import GraphLadder
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.speculation.cuda_draft_model import PLACES, CudaDraftModel
from rwkv_batch.runner.speculation.draft_model import Guess
from rwkv_batch.runner.speculation.verifiers import verifier_of
from rwkv_batch.wire.protocol import Grammar, Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("untimed", "launched_one_by_one")]
on_gpu = pytest.mark.usefixtures("graphs")
EMULATED = DEVICE == "cpu"
VOCAB, LAYERS, WIDTH = (64, 2, 64) if EMULATED else (512, 4, 256)
PLACE = torch.device("cpu") if EMULATED else torch.device("cuda", 0)
MOST = 5
TALE = "User: Tell me a story about a dog.\n\nAssistant:"
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(seed=3, temperature=0.9, top_p=0.9)


@pytest.fixture
def launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no graphs, their launches run."""
    if EMULATED:
        monkeypatch.setattr(GraphLadder, "capture_all", lambda ladder, *_, **__: ladder.capture_later())


def draft_of(checkpoint: Checkpoint, ids: torch.Tensor | None = None) -> CudaDraftModel:
    made = CudaDraftModel(RWKV7Cuda(checkpoint, PLACE), MOST, ids)
    made.allocate(64)
    return made


def one_by_one(checkpoint: Checkpoint, text: list[int], count: int) -> list[Guess]:
    """What the model finds likeliest behind a text, each token fed in a step of its own.

    They end where another token is as likely, which a batch of another size may take.
    """
    model = RWKV7Cuda(checkpoint, PLACE)
    states, found, tokens = model.new_states(1), list[Guess](), text
    model.capture(states, 1, late=EMULATED, most_tokens=24)
    for _ in range(count):
        logits = model.forward(torch.tensor(tokens), [len(tokens)], [0], states)[0]
        (chance, second), (token, _) = (each.tolist() for each in logits.softmax(0).topk(2))
        if chance < 1.01 * second:
            break
        found.append(Guess(token, chance))
        tokens = [found[-1].token]
    return found


def same(found: list[Guess], wanted: list[Guess]) -> bool:
    """As far as these go."""
    pairs = list(zip(found, wanted, strict=False))
    return all(a.token == b.token and abs(a.chance - b.chance) < 1e-2 * b.chance for a, b in pairs)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_guesses_are_the_likeliest_tokens_behind_what_is_known(rows):
    checkpoint = tiny(LAYERS, WIDTH, VOCAB)
    draft = draft_of(checkpoint)
    texts = {slot: [(7 * slot + 3 * place + 1) % VOCAB for place in range(2 + slot)] for slot in range(rows)}
    wanted = {slot: one_by_one(checkpoint, text, MOST) for slot, text in texts.items()}
    for slot in texts:
        draft.begin(slot)
    found = draft.first(texts, passes=MOST)
    assert sum(map(len, wanted.values())) > rows * MOST / 2
    assert list(found) == list(texts) and all(len(guesses) == MOST for guesses in found.values())
    assert all(same(found[slot], wanted[slot]) for slot in texts)

    # Guesses leave no trace: other tokens came, of which the first row got two.
    more = {slot: [5] if slot else [4, 9] for slot in texts}
    wanted = {slot: one_by_one(checkpoint, texts[slot] + more[slot], 3) for slot in texts}
    found = draft.first(more, passes=1)
    assert all(same(found[slot], wanted[slot][:1]) for slot in texts)
    for depth in (1, 2):  # one pass at a time gives the same
        last = {slot: guesses[-1].token for slot, guesses in found.items()}
        found = draft.further(last, begin=depth == 1)
        assert all(same(found[slot], wanted[slot][depth : depth + 1]) for slot in texts)


def test_a_pass_goes_on_behind_those_that_were_made_together():
    checkpoint = tiny(LAYERS, WIDTH, VOCAB)
    draft, text = draft_of(checkpoint), [3, 1, 4]
    draft.begin(9)
    draft.read({9: text[:2]})
    found = draft.first({9: text[2:]}, passes=3)[9]
    found += draft.further({9: found[-1].token})[9]
    assert same(found, one_by_one(checkpoint, text, 4))


def test_masks_bind_guesses_and_a_head_may_have_some_tokens_only():
    checkpoint = tiny(LAYERS, WIDTH, VOCAB)
    ids = torch.arange(2, VOCAB, 3)
    tensors = {**checkpoint.tensors, "head.weight": checkpoint.tensors["head.weight"][ids]}
    draft = draft_of(replace(checkpoint, tensors=tensors), ids)
    for slot in range(2):
        draft.begin(slot)
    free = draft.first({0: [3, 1], 1: [3, 2]}, passes=MOST)
    assert all(guess.token in ids.tolist() for guesses in free.values() for guess in guesses)
    mask = np.zeros((VOCAB + 31) // 32, np.int32)
    for token in (8, 9):  # the second has no row
        mask[token // 32] |= 1 << token % 32
    draft.begin(0)
    draft.begin(1)
    bound = draft.first({0: [3, 1], 1: [3, 2]}, {0: mask})
    assert bound[0] == [Guess(8, 1.0)] and bound[1][0].token == free[1][0].token
    draft.begin(0)
    assert draft.first({0: [3, 1]}, {0: np.zeros_like(mask)})[0][0].chance == 0, "nothing may come"


def test_rows_that_had_guesses_last_keep_their_states():
    checkpoint, text = tiny(LAYERS, WIDTH, VOCAB), [3, 1, 4]
    draft = draft_of(checkpoint)
    for slot in range(100, 100 + PLACES):
        draft.begin(slot)
        draft.read({slot: text})
    assert draft.holds(100)
    draft.begin(7)
    assert draft.holds(100) and draft.holds(7) and not draft.holds(101)
    found = draft.first({100: [5], 7: [5], 102: [6]}, passes=2)
    for slot, known in ((100, [*text, 5]), (7, [5]), (102, [*text, 6])):
        assert same(found[slot], one_by_one(checkpoint, known, 2))


def test_what_a_draft_model_takes_is_counted():
    model = RWKV7Cuda(tiny(LAYERS, WIDTH, VOCAB), PLACE)
    runner, draft = CudaRunner(model, torch.float16, "own", speculate=3), CudaDraftModel(model, 3)
    alone = runner.bytes_needed(4, 1, 24)
    runner.beside = draft.bytes_needed
    assert runner.bytes_needed(4, 1, 24) == alone + draft.bytes_needed
    assert draft.bytes_needed > draft.state_bytes(5) >= 2 * PLACES * model.new_states(1).memory.nbytes


def test_what_guesses_cost_is_measured():
    model = RWKV7Cuda(tiny(LAYERS, WIDTH, VOCAB), PLACE)
    runner = CudaRunner(model, torch.float16, "own", speculate=MOST)
    runner.allocate(8, 1, 24, late=EMULATED)
    verifier = verifier_of(runner)
    assert verifier
    cost = draft_cost(runner, verifier, MOST, draft_of(tiny(LAYERS, WIDTH, VOCAB)))
    assert cost.guess > 0 and cost.chained > 0 and cost.read >= 0


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return from_tensors("demo", unpack.tensors())


@pytest.fixture(scope="module")
def drivers(untimed: None, bundled: Checkpoint) -> Iterator[list[Driver]]:
    """The bundled model alone, and with its draft model, whose guesses cost nothing.

    Rows draw the same beside any others.
    """
    if EMULATED:
        pytest.skip("needs a GPU")
    fields = {"device": "cuda", "max_rows": 16, "batch_invariant": True, "l1": 2, "prefix_cache_mb": 0}
    fields |= {"prefill_tokens": 256}
    with_it = {"speculate": MOST, "draft_model": str(unpack.DRAFT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "draft_cost", lambda *of: DraftCost(0.0, 0.0))
        patch.setattr(drafting, "WAIT", 0.0)
        made = [Driver(weights=bundled, **fields, **given) for given in ({}, with_it)]
        yield made
    for driver in made:
        driver.engine.close()


@on_gpu
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_without_a_draft_model(drivers: list[Driver], sampling: Sampling):
    given = {"sampling": sampling, "max_tokens": 40}
    for prompts in ([TALE], [TALE, "1, 2, 3,", "User: What is the capital of France?\n\nAssistant:"]):
        want, found = (driver.engine.generate(prompts, **given) for driver in drivers)
        assert [row.text for row in found] == [row.text for row in want]
        assert found[0].accepted > found[0].tokens / 3
    number = Grammar("regex", "[0-9]{3}-abc-[0-9]{3}")
    want, found = (driver.engine.generate([TALE], **given, grammar=number) for driver in drivers)
    assert [row.text for row in found] == [row.text for row in want]


@on_gpu
def test_sessions_are_those_without_a_draft_model(drivers: list[Driver]):
    stored, before = [], drivers[1].engine.counts.steps.accepted
    for driver in drivers:
        given = {"sampling": GREEDY, "session": "s", "stop_ids": [0], "max_tokens": 30}
        said = [driver.say(prompt, **given) for prompt in (TALE, "\n\nUser: And a cat?\n\nAssistant:")]
        stored.append((said, driver.engine.pool.find("s").head.digest))
    assert stored[0] == stored[1]
    assert drivers[1].engine.counts.steps.accepted > before


@on_gpu
def test_of_many_rows_none_has_guesses(drivers: list[Driver]):
    given = {"sampling": SAMPLED, "max_tokens": 20, "stop_ids": []}
    want, found = (driver.engine.generate([TALE] * 12, **given) for driver in drivers)
    assert [row.text for row in found] == [row.text for row in want]
    assert sum(row.accepted + row.rejected for row in found) == 0


@on_gpu
def test_an_engine_counts_the_states_of_its_draft_model_and_draws_the_same(bundled: Checkpoint):
    """With what guesses cost on this GPU, which may be too much."""
    needed, told = [], []
    for given in ({}, {"draft_model": str(unpack.DRAFT)}):
        fields = {"device": "cuda", "max_rows": 4, "l1": 0, "batch_invariant": True, "prefill_tokens": 256}
        engine = Engine(bundled, **fields, speculate=MOST, **given)
        needed.append(engine.runner.bytes_needed(4, 0, 256))
        told.append(engine.generate([TALE], sampling=SAMPLED, max_tokens=60)[0].text)
        engine.close()
    assert needed[1] > needed[0] + (1 << 20) and told[0] == told[1]


@on_gpu
def test_a_draft_model_of_another_vocabulary_is_refused():
    make = partial(Engine, tiny(LAYERS, WIDTH, VOCAB), device="cuda", max_rows=4, speculate=3)
    message = refusal(lambda: make(draft_model=str(unpack.DRAFT)))
    assert message.startswith("--draft-model") and "65,536" in message and "512" in message


@on_gpu
def test_a_draft_model_needs_the_kernels(bundled: Checkpoint):
    config = EngineConfig(
        device="cuda", backend="torch", max_rows=2, speculate=3, draft_model=str(unpack.DRAFT)
    )
    with pytest.raises(DeviceError, match=r"^--draft-model .* --backend torch "):
        Engine(bundled, config=config)
