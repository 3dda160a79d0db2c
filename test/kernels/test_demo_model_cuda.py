"""The bundled model on a CUDA GPU in fp16, on text that it was never trained on, against the reference in
fp32.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from cuda_gpu import clear_choice, needs_gpu, off, unflushed
from torch import Tensor

from demo.training.evaluate import SEED, TASKS
from demo.training.example import Example
from rwkv_batch.bundled import unpack
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.state.slots import States
from rwkv_batch.text.tokenizer import END_OF_TEXT, VOCABULARY, Tokenizer

pytestmark = [*needs_gpu, pytest.mark.many_launches]
LOGITS, STATES, PERPLEXITY = 1e-2, 2e-2, 1e-3  # relative errors allowed
HELD_OUT = [make for name, make in TASKS.items() if "trained" not in name]
TOKENIZER = Tokenizer()
SLOTS = 120
QUESTION = "User: What is the capital of France?\n\nAssistant:"
DIALOGUE = "User: My name is Anna.\n\nAssistant: Nice to meet you, Anna!\n\n"


@pytest.fixture(scope="module")
def model() -> RWKV7Cuda:
    return RWKV7Cuda(from_tensors("demo", unpack.tensors()), "cuda")


@pytest.fixture(scope="module")
def truth(model: RWKV7Cuda) -> RWKV7:
    return RWKV7(model.checkpoint, "cuda")


def held_out(count: int) -> list[Example]:
    rng = random.Random(SEED)
    return [HELD_OUT[i % len(HELD_OUT)](rng) for i in range(count)]


@pytest.fixture(scope="module")
def all_states(model: RWKV7Cuda) -> dict[torch.dtype, CudaStates]:
    """States for all tests, by how they are stored: the model's graphs are over one set of states."""
    return {wkv: model.new_states(SLOTS, wkv) for wkv in (torch.float16, torch.float32)}


@pytest.fixture
def states(all_states: dict[torch.dtype, CudaStates], request: pytest.FixtureRequest) -> CudaStates:
    """Zero."""
    found = all_states[request.getfixturevalue("wkv") if "wkv" in request.fixturenames else torch.float16]
    found.clear(range(SLOTS))
    return found


def joined(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def tokens_of(examples: list[Example]) -> list[list[int]]:
    """Each text with its end; END_OF_TEXT is also what goes before it."""
    return [
        [END_OF_TEXT, *TOKENIZER.encode(example.prompt + example.answer), END_OF_TEXT] for example in examples
    ]


def read_together(
    texts: list[list[int]], pairs: list[tuple[Callable[..., Tensor], States]]
) -> Iterator[tuple[list[int], int, list[Tensor]]]:
    """All texts side by side, a token a step: the rows, how much of them has been read, and each model's
    logits `[rows, vocab]`.
    """
    for place in range(max(map(len, texts)) - 1):
        rows = [row for row, text in enumerate(texts) if place < len(text) - 1]
        tokens = torch.tensor([texts[row][place] for row in rows])
        yield (
            rows,
            place + 1,
            [forward(tokens, [1] * len(rows), rows, states) for forward, states in pairs],
        )


def loss(logits: Tensor, tokens: list[int]) -> Tensor:
    """Of each row's next token, in nats."""
    return logits.double().logsumexp(1) - logits.double()[range(len(tokens)), tokens]


@pytest.mark.parametrize("wkv", [torch.float16, torch.float32])
def test_held_out_text_is_as_likely_and_the_greedy_token_the_same(model, truth, states, wkv):
    examples = held_out(SLOTS)
    texts = tokens_of(examples)
    answers = [len(TOKENIZER.encode(example.prompt)) for example in examples]
    losses: dict[str, list[Tensor]] = {"all": [], "answers": []}
    errors = []  # squares: of the difference, of the reference
    clear = seen = 0
    pairs = [(partial(unflushed, model), states), (truth.forward, truth.new_states(SLOTS))]
    for rows, read, (logits, wanted) in read_together(texts, pairs):
        errors.append(
            torch.stack(((logits - wanted).double().square().sum(1), wanted.double().square().sum(1)))
        )
        sure = clear_choice(wanted[:, :VOCABULARY], LOGITS)
        assert torch.equal(logits[sure, :VOCABULARY].argmax(1), wanted[sure, :VOCABULARY].argmax(1))
        clear, seen = clear + int(sure.sum()), seen + len(rows)
        following = [texts[row][read] for row in rows]
        both = torch.stack((loss(logits, following), loss(wanted, following)))
        losses["all"].append(both)
        losses["answers"].append(both[:, [read > answers[row] for row in rows]])
    assert clear > seen / 2
    off_by, size = torch.cat(errors, 1)
    assert off_by.sum() < LOGITS**2 * size.sum() and (off_by < LOGITS**2 * size).double().mean() > 0.999
    for part in losses.values():
        got, want = torch.cat(part, 1).mean(1)
        assert abs(float((got - want).exp()) - 1) < PERPLEXITY


def test_prefill_of_every_beginning_is_as_likely(model, truth, states):
    """What the prompt's kernels give, wherever a text ends."""
    examples = held_out(6)
    losses = []
    for example, text in zip(examples, tokens_of(examples), strict=True):
        beginnings = [text[:end] for end in range(1, len(text))][-SLOTS:]
        lengths, slots = [len(b) for b in beginnings], range(len(beginnings))
        states.clear(slots)
        logits = model.forward(torch.tensor(joined(beginnings)), lengths, slots, states)
        wanted = truth.forward(
            torch.tensor(joined(beginnings)), lengths, slots, truth.new_states(len(beginnings))
        )
        assert off(logits, wanted) < LOGITS
        answer = len(TOKENIZER.encode(example.answer)) + 1
        losses.append(torch.stack([loss(found[-answer:], text[-answer:]) for found in (logits, wanted)]))
    got, want = torch.cat(losses, 1).mean(1)
    assert abs(float((got - want).exp()) - 1) < PERPLEXITY


@pytest.mark.parametrize("wkv", [torch.float16, torch.float32])
def test_4096_tokens_leave_the_state(model, truth, states, wkv):
    tokens = torch.tensor(joined(tokens_of(held_out(SLOTS)))[:4096])
    assert len(tokens) == 4096
    wanted = truth.new_states(1)
    want = truth.forward(tokens, [4096], [0], wanted)
    whole = model.forward(tokens, [4096], [0], states)
    start = 0
    for size in (1, 15, 16, 17, 63, 1000, 2, 982, 1900, 100):  # in all 4096
        pieces = unflushed(model, tokens[start : start + size], [size], [1], states)
        start += size
    model.forward(tokens[:4000], [4000], [2], states, [])
    for token in tokens[4000:]:
        steps = unflushed(model, token[None], [1], [2], states)
    assert start == 4096
    states.flush([1, 2])
    for slot, logits in ((0, whole), (1, pieces), (2, steps)):
        assert off(logits[0], want[0]) < LOGITS and off(states.wkv[slot], wanted.wkv[0]) < STATES
        assert off(states.shift[slot], wanted.shift[0]) < STATES


def greedy(
    model: RWKV7Cuda, states: CudaStates, prompt: Tensor, cuts: list[int], slot: int = 0, count: int = 12
) -> list[int]:
    """The tokens drawn after a prompt that is fed in pieces which end at `cuts`."""
    start, drawn = 0, []
    states.clear([slot])
    for end in (*cuts, len(prompt)):
        logits = unflushed(model, prompt[start:end], [end - start], [slot], states)
        start = end
    for _ in range(count):
        drawn.append(int(logits[0, :VOCABULARY].argmax()))
        if drawn[-1] == END_OF_TEXT:
            break
        logits = unflushed(model, torch.tensor(drawn[-1:]), [1], [slot], states)
    return drawn


def certain(truth: RWKV7, prompt: Tensor, text: list[int]) -> bool:
    """Whether the text is the reference's, and none of its tokens a near-tie."""
    every = torch.cat((prompt, torch.tensor(text)))
    states = truth.new_states(1)
    lines = [truth.forward(every[: len(prompt)], [len(prompt)], [0], states)[0]]
    lines += [truth.forward(token[None], [1], [0], states)[0] for token in every[len(prompt) : -1]]
    logits = torch.stack(lines)
    return logits[:, :VOCABULARY].argmax(1).tolist() == text and bool(
        clear_choice(logits[:, :VOCABULARY], LOGITS).all()
    )


def test_every_split_of_a_prompt_gives_the_same_text(model, truth, states):
    prompt = torch.tensor(TOKENIZER.encode(DIALOGUE + QUESTION)[-40:])
    text = greedy(model, states, prompt, [])
    assert len(text) > 5 and certain(truth, prompt, text)
    for cut in range(1, len(prompt)):
        assert greedy(model, states, prompt, [cut]) == text
    assert greedy(model, states, prompt, list(range(1, len(prompt)))) == text


def test_random_splits_of_a_long_prompt_give_the_same_text(model, truth, states):
    prompt = torch.tensor(TOKENIZER.encode(DIALOGUE * 80 + QUESTION)[-1000:])
    assert len(prompt) == 1000
    text = greedy(model, states, prompt, [])
    assert len(text) > 5 and certain(truth, prompt, text)
    for pieces in (1, 2, 3, 7, 20, 60):
        for _ in range(3):
            assert greedy(model, states, prompt, sorted(random.sample(range(1, 1000), pieces))) == text


def test_a_slot_changes_no_bit(model, states):
    prompt = torch.tensor(TOKENIZER.encode(DIALOGUE + QUESTION))
    found = []
    for slot in (0, 1, 31, 32, SLOTS - 1):
        logits = model.forward(prompt, [len(prompt)], [slot], states)
        found.append((logits, model.forward(prompt[-1:], [1], [slot], states), states.memory[slot].clone()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("rows", [2, 7, 33])
def test_a_row_has_the_same_bits_wherever_it_stands_in_the_batch(model, states, rows):
    tokens, order = torch.randint(1, VOCABULARY, (rows,)), torch.randperm(rows)
    slots = (torch.randperm(SLOTS - rows)[:rows] + rows).tolist()  # not those of the first batch
    for _ in range(3):
        logits = unflushed(model, tokens, [1] * rows, range(rows), states)
        shuffled = unflushed(model, tokens[order], [1] * rows, slots, states)
        assert torch.equal(logits[order.to(logits.device)], shuffled)
    states.flush(range(SLOTS))
    assert torch.equal(states.memory[:rows][order.to(logits.device)], states.memory[slots])
