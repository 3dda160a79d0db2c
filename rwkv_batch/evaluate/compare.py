"""Weight formats against the same model in fp32, on a CPU: how far the next-token distributions are apart.

Each model reads the same tokens. Of the places that count, the table says, in the mean over them:

    KL           of the format's distribution from that of fp32, in nats
    perplexity   of the tokens that are there, and by how many percent it is above that of fp32
    agreement    how often both have the same likeliest token, the token before being given

"fp8, many rows" is how a GPU multiplies many rows by fp8: the inputs of the matrices are fp8 too. So are they
in "int4, activations fp8", where the matrices but the head are copies in fp8 of what the format stands for.
Either is computed here by rounding both sides, with sums in fp32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.bundled.unpack import HELD_OUT
from rwkv_batch.evaluate.asks import document
from rwkv_batch.evaluate.report import Json, Result
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.quantization.calibrate import calibrated
from rwkv_batch.model.quantization.matrices import HEAD
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.progress import hidden
from rwkv_batch.ops.weights.channels import Fp8BothWeight, Fp8Weight, Int8Weight
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.groups import CALIBRATED, Int4Weight
from rwkv_batch.ops.weights.weight import Weight
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.sampling.prompt_logprobs import PromptScores

FED_AT_ONCE = 256  # tokens
FP32, FP8_OF_MANY_ROWS = "fp32", "fp8, many rows"
COPIED = (Int8Weight, Int4Weight)  # formats of which a GPU may have copies in fp8
HEADINGS = ("weights", "MB", "KL", "perplexity", "above fp32 by %", "agreement", "tokens")


@dataclass(frozen=True)
class ReadText:
    """Tokens that a model reads from the state zero. `first`: the first of them that counts, at least 1."""

    tokens: list[int]
    first: int = 1


@dataclass
class Distance:
    """Sums over places of what a format is apart from fp32."""

    places: int = 0
    divergence: float = 0.0
    logprob: float = 0.0  # of the tokens that are there
    agreeing: int = 0

    def add(self, wanted: Tensor, found: Tensor, targets: Tensor) -> None:
        """Log probabilities `[n, vocab]` of both, and the tokens `[n]` that are there."""
        self.places += len(targets)
        self.divergence += float((wanted.exp() * (wanted - found)).sum(dtype=torch.float64))
        self.logprob += float(found.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64))
        self.agreeing += int((wanted.argmax(1) == found.argmax(1)).sum())


class EveryPlace(PromptScores):
    """Takes the logits of all places of one row, in place of the log probabilities of some tokens."""

    def __init__(self, first: int, count: int, take: Callable[[Tensor], None]) -> None:
        """The reader of so many places, from the first on."""
        self._first, self._count, self._take = first, count, take

    def __bool__(self) -> bool:
        return self._count > 0

    def places(self, starts: Sequence[int]) -> list[int]:
        return [starts[0] + self._first + place for place in range(self._count)]

    def take(self, logits: Tensor) -> None:
        self._take(logits)


def compare(
    checkpoint: Checkpoint,
    texts: Sequence[ReadText],
    formats: Sequence[str],
    head: bool | None = None,
    calibration: Sequence[Sequence[int]] = (),
    fp8_copies: bool = False,
) -> Result:
    """The table for some formats. head: as for `quantize`.

    calibration: tokens of texts by which int4 is packed a second time. fp8_copies: whether formats are also
    measured as many rows multiply with their copies in fp8. Raises CheckpointError for a packed checkpoint.
    """
    targets = torch.tensor([token for text in texts for token in text.tokens[text.first :]])
    reference: list[Tensor] = []
    alone = Distance()
    at = 0
    for found in _read(checkpoint, texts, FP32):
        reference.append(found)
        alone.add(found, found, targets[at : at + len(found)])
        at += len(found)
    records = [_record(FP32, checkpoint, alone, alone)]
    for name, packed, run in _packed(checkpoint, formats, head, calibration, fp8_copies):
        distance, at = Distance(), 0
        for wanted, found in zip(reference, _read(run, texts, name), strict=True):
            distance.add(wanted, found, targets[at : at + len(found)])
            at += len(found)
        records.append(_record(name, packed, distance, alone))
    rows = [tuple(record.values()) for record in records]
    return Result(records, {record["weights"]: record["kl"] for record in records}, [[HEADINGS, *rows]])


def _packed(
    checkpoint: Checkpoint,
    formats: Sequence[str],
    head: bool | None,
    calibration: Sequence[Sequence[int]],
    fp8_copies: bool,
) -> Iterator[tuple[str, Checkpoint, Checkpoint]]:
    """Each with what computes in its place. One at a time, as each may take what memory there is."""
    for name in formats:
        packed = quantize(checkpoint, name, head)
        yield name, packed, packed
        if name == Fp8Weight.format:
            both = {of: Fp8BothWeight.of(w) for of, w in packed.packed.items() if isinstance(w, Fp8Weight)}
            yield FP8_OF_MANY_ROWS, packed, replace(packed, packed=dict(packed.packed) | both)
        elif fp8_copies and issubclass(FORMATS[name], COPIED):
            copies = {of: _copy(w) for of, w in packed.packed.items() if of != HEAD}
            yield f"{name}, activations fp8", packed, replace(packed, packed=dict(packed.packed) | copies)
        if calibration and name in CALIBRATED:
            model = calibrated(checkpoint, name, calibration, head)
            yield f"{name}, calibrated", model, model


def _copy(weight: Weight) -> Fp8BothWeight:
    """A matrix's copy in fp8, with inputs in fp8 too."""
    return Fp8BothWeight.of(Fp8Weight.repack(weight, "cpu"))


def held_out(count: int) -> list[ReadText]:
    """What the bundled model has not been trained on: prompts, and answers of so many tokens or more.

    There are some 4000 tokens of answers.
    """
    texts: list[ReadText] = []
    with HELD_OUT.open("rb") as lines:
        for line in lines:
            if count <= 0:
                break
            text = msgspec.json.decode(line)
            texts.append(ReadText(text["prompt"] + text["answer"], len(text["prompt"])))
            count -= len(text["answer"])
    return texts


def texts_of(texts: Sequence[str], count: int) -> list[ReadText]:
    """The beginnings of texts, so many tokens in all at most. Each follows the end of the text before."""
    found: list[ReadText] = []
    for text in texts:
        tokens = document(text)[: count + 1]
        if len(tokens) > 1:
            found.append(ReadText(tokens))
            count -= len(tokens) - 1
    return found


def _read(checkpoint: Checkpoint, texts: Sequence[ReadText], label: str) -> Iterator[Tensor]:
    """The log probabilities at the places that count, some at a time: `[n, vocab]`."""
    model = TorchRunner(checkpoint, [torch.device("cpu")], torch.float32).model
    with tqdm(
        total=sum(len(text.tokens) for text in texts), desc=label, unit="token", disable=hidden()
    ) as bar:
        for text in texts:
            states = model.new_states(1)
            # The logits at a place are those of the token behind it.
            wanted = range(text.first - 1, len(text.tokens) - 1)
            for start in range(0, wanted.stop, FED_AT_ONCE):
                fed = range(start, min(start + FED_AT_ONCE, wanted.stop))
                first = max(wanted.start, fed.start)
                found: list[Tensor] = []
                places = EveryPlace(first - fed.start, max(0, fed.stop - first), found.append)
                tokens = torch.tensor(text.tokens[fed.start : fed.stop])
                model.forward(tokens, [len(fed)], [0], states, [], (), places)
                yield from (logits.log_softmax(1) for logits in found)
                bar.update(len(fed))


def _record(name: str, checkpoint: Checkpoint, distance: Distance, alone: Distance) -> Json:
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    size += sum(weight.nbytes for weight in checkpoint.packed.values())
    return {
        "weights": name,
        "mb": size / 1e6,
        "kl": max(0.0, distance.divergence / distance.places),
        "perplexity": math.exp(min(-distance.logprob / distance.places, 700.0)),
        "percent_above": 100 * math.expm1((alone.logprob - distance.logprob) / distance.places),
        "agreement": distance.agreeing / distance.places,
        "tokens": distance.places,
    }
