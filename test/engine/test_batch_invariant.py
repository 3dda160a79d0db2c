"""--batch-invariant: an answer and its logprobs are the same, bit for bit, no matter what runs beside it."""

import shutil
import threading
from pathlib import Path
from random import Random

import pytest
import torch
from cuda_gpu import needs_gpu

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner import torch_runner
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest, Progress, RowDelta, Sampling, SessionTurn

pytestmark = pytest.mark.thorough

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
STORED = [
    ("cpu", "auto", None),
    *(
        pytest.param("cuda", name, wkv, marks=needs_gpu)
        for name in ("auto", "portable")
        for wkv in ("fp32", "fp16")
    ),
]
FAMILIES = {"rwkv7": random_checkpoint, "rwkv7a": random_rwkv7a, "rwkv6": random_rwkv6}
TEXT = (
    "User: What is the capital of France?\n\nAssistant: The capital of France is Paris.\n\n"
    "User: 请把这句话翻译成英文：你好世界！\n\nAssistant: Hello world! The quick brown fox. "
)
KEY, WOKEN = b"test", threading.Event()
PREFIX = list(range(300, 370))  # of many prompts, long enough to be cached


def requests(count: int, vocab: int | None) -> list[GenerateRequest]:
    """Of random lengths; with all ways of drawing, logprobs of answers and of some prompts."""
    rng, found = Random(1), []
    for number in range(count):
        length = rng.choice((1, 2, 5, 15, 16, 17, 33, 70))
        if vocab is None:
            begin = rng.randrange(len(TEXT))
            prompt: str | list[int] = (TEXT[begin:] + TEXT)[: 3 * length]
        else:
            prompt = [rng.randrange(1, vocab) for _ in range(length)]
        temperature = rng.choice((0.0, 1.0, 1.3))
        sampling = Sampling(temperature=temperature, top_p=rng.choice((1.0, 0.7)), seed=number)
        request = GenerateRequest(
            id=str(number),
            prompts=[prompt],
            max_tokens=rng.choice((1, 4, 9)),
            n=rng.choice((1, 1, 1, 3)),
            stop_ids=[],
            sampling=sampling,
            top_logprobs=rng.choice((0, 3)),
            prompt_logprobs=rng.choice((None, None, None, 2)),  # which take most of the time
            return_ids=True,
            flush_tokens=rng.choice((0, 1)),
            prefix_ids=rng.choice(([], [], PREFIX)),
        )
        found.append(request)
    return found


def engine(weights: Checkpoint | None, device: str, **options) -> Engine:
    fields = {"device": device, "max_rows": 1, "l1": 0, "prefix_cache_mb": 0, "batch_invariant": True}
    return Engine(weights, wake=WOKEN.set, **fields | options)


def answers(
    model: Engine, asked: list[GenerateRequest], together: int, closes: bool = True
) -> dict[str, list]:
    """What each row said, with ids and logprobs. together: that run at once; others arrive at random."""
    rng, waiting, found = Random(2), asked[::-1], {}
    unfinished = sum(request.n for request in asked)
    while unfinished:
        while waiting and len(model.scheduler.running) < together and (together == 1 or rng.random() < 0.5):
            request = waiting.pop()
            model.add((KEY, request.id), request)
        if not (model.busy or waiting):
            assert WOKEN.wait(30), "the engine waits for nothing"
        WOKEN.clear()
        for (_, name), event in model.step():
            if isinstance(event, Progress):
                for delta in event.rows:
                    add(found.setdefault(f"{name} {delta.row}", ["", [], [], []]), delta)
                    unfinished -= delta.finish_reason is not None
    if closes:
        model.close()
    return found


def add(row: list, delta: RowDelta) -> None:
    row[0] += delta.text
    for kept, new in zip(row[1:], (delta.ids, delta.logprobs, delta.prompt), strict=True):
        kept += new


@pytest.mark.parametrize(("device", "backend", "wkv"), STORED)
def test_answers_are_those_alone(device: str, backend: str, wkv: str | None) -> None:
    """Prompts of the bundled model: alone, and as they arrive in batches of other sizes, cut anywhere."""
    asked = requests(200, None)
    alone = answers(engine(None, device, backend=backend, wkv=wkv, prefill_tokens=4096), asked, 1)
    assert len(alone) > len(asked)
    options = {"backend": backend, "wkv": wkv}
    mixed = engine(None, device, max_rows=24, prefill_tokens=13, prefix_cache_mb=64, **options)
    assert answers(mixed, asked, 24) == alone
    assert mixed.counts.cache_hits > 0
    if device == "cuda":
        mixed = engine(None, device, max_rows=320, prefill_tokens=700, **options)
        assert answers(mixed, asked, 320) == alone


@pytest.mark.parametrize(
    ("family", "device", "backend", "wkv"),
    [
        *((family, "cpu", "auto", None) for family in FAMILIES),
        *(
            pytest.param(family, "cuda", name, wkv, marks=needs_gpu)
            for family in FAMILIES
            for name in ("auto", "portable")
            for wkv in ("fp32", "fp16")
            if (family, wkv) != ("rwkv6", "fp16")  # which is refused
        ),
    ],
)
def test_every_family(family: str, device: str, backend: str, wkv: str | None) -> None:
    weights = from_tensors(family, FAMILIES[family](3, 192, 700))
    asked, options = requests(40, 690), {"backend": backend, "wkv": wkv}
    alone = answers(engine(weights, device, **options), asked, 1)
    mixed = engine(weights, device, max_rows=16, prefill_tokens=23, **options)
    assert answers(mixed, asked, 16) == alone


def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runner, "SMALL", 0)  # the model is so small that one thread would run it
    monkeypatch.setattr(torch_runner, "THREADS", 2)
    before, asked = torch.get_num_threads(), requests(6, None)
    weights = from_tensors("wide", random_checkpoint(2, 256))  # of few layers, as threads wait for each other
    alone = answers(engine(weights, "cpu"), asked, 1)
    assert torch.get_num_threads() == 2
    assert answers(engine(weights, "cpu", max_rows=8, prefill_tokens=31), asked, 8) == alone
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "wkv"),
    [("cpu", None), *(pytest.param("cuda", wkv, marks=needs_gpu) for wkv in (None, "fp16"))],
)
def test_a_session_goes_on_as_if_it_had_never_ended(device: str, wkv: str | None, tmp_path: Path) -> None:
    """Turns from the slot, from the tokens of a database, and one prompt of all tokens."""
    prompts = [f"User: {text}\n\nAssistant:" for text in ("My name is Anna.", "What is my name?", "Hello!")]
    sampling = Sampling(temperature=1.2, seed=5)

    def turn(number: int) -> GenerateRequest:
        return GenerateRequest(
            id=str(number),
            prompts=[prompts[number]],
            max_tokens=12,
            stop_ids=[],
            sampling=sampling,
            top_logprobs=3,
            return_ids=True,
            turn=SessionTurn(source="anna", target="anna"),
        )

    def conversation(file: Path | None, images: bool = True) -> list[dict[str, list]]:
        """Over a database that is opened anew for each turn, with or without its stored states."""
        found = []
        model = engine(None, device, max_rows=4, l1=4, wkv=wkv)
        for number in range(len(prompts)):
            if file:
                if not images:
                    shutil.rmtree(f"{file}.images", ignore_errors=True)
                options = {"state_db": str(file), "wkv": wkv}
                model = engine(None, device, max_rows=4, prefill_tokens=7 + number, **options)
            found.append(answers(model, [turn(number)], 1, closes=bool(file)))
        model.close()
        return found

    said = conversation(None)
    assert conversation(tmp_path / "images.db") == said
    assert conversation(tmp_path / "tokens.db", images=False) == said
    tokens: list[int] = []
    for number, found in enumerate(said):
        tokens += Tokenizer().encode(prompts[number])
        request = GenerateRequest(
            id=str(number),
            prompts=[list(tokens)],
            max_tokens=12,
            stop_ids=[],
            sampling=sampling,
            top_logprobs=3,
            return_ids=True,
        )
        assert answers(engine(None, device, max_rows=4, wkv=wkv), [request], 1) == found
        tokens += found[f"{number} 0"][1]


@pytest.mark.parametrize("device", DEVICES)
def test_what_it_does_not_hold_for_is_refused(device: str) -> None:
    rwkv6 = from_tensors("rwkv6", random_rwkv6(2, 128, 700))
    for weights, options in ((rwkv6, {"wkv": "fp16"}), (None, {"max_adapters": 1})):
        (name,) = options
        with pytest.raises(DeviceError, match=name.replace("_", "-")):
            engine(weights, device, **options)


def test_states_in_fp16_are_refused_on_a_cpu() -> None:
    with pytest.raises(DeviceError, match="fp32 on a CPU"):
        engine(None, "cpu", wkv="fp16")
