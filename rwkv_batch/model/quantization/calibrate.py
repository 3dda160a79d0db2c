"""int4 by what a model does with a text: each group's steps are laid out so that its products stay close.

The steps of a group may leave its outermost numbers out, which makes them finer for the others. Its range is
that of SHRINKS times with which `sum of mean x^2 (w - Q(w))^2` is smallest, where x are the inputs that the
matrix has had while the model read the text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint, Progress
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.quantization.matrices import formats_of
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv6 import RWKV6
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.ops.linear import Linear
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.groups import CALIBRATED
from rwkv_batch.ops.weights.weight import Matrix, Weight

SHRINKS = (1.0, 0.95, 0.9)
FED_AT_ONCE = 256  # tokens


def calibrated(
    checkpoint: Checkpoint,
    weights: str,
    texts: Sequence[Sequence[int]],
    head: bool | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """The model in `int4` or `int4-128`, by what it does with the tokens of texts. head: as for `quantize`.

    Raises CheckpointError for other formats, without a token to read, and for a model that is packed already.
    """
    if weights not in CALIBRATED:
        known = " and ".join(CALIBRATED)
        raise CheckpointError(f"--calibrate is for {known}, not for {weights}; leave it out.")
    if not any(texts):
        raise CheckpointError("--calibrate needs a text of one token at least.")
    if checkpoint.weights:
        return quantize(checkpoint, weights, head)  # which says what is wrong
    plain = replace(checkpoint, tensors=dict(checkpoint.tensors))
    heed = _squares(plain, texts)

    def pack(name: str, kind: str, matrix: Tensor) -> Weight:
        if kind not in CALIBRATED:  # the head
            return FORMATS[kind].pack(matrix)
        return CALIBRATED[kind].pack_heeding(matrix, heed[name], SHRINKS)

    return quantize(plain, weights, head, progress, pack)


@torch.inference_mode()
def _squares(checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The sums of x^2 of each matrix's inputs `[inputs]`, over all tokens; texts begin in the state zero."""
    base: Any = RWKV6 if checkpoint.family == "rwkv6" else RWKV7
    names = formats_of(checkpoint.family, checkpoint.layers, "int4", head=False)
    by_tensor = {id(checkpoint.tensors[name]): name for name in names}
    found = {name: torch.zeros(checkpoint.tensors[name].shape[1]) for name in names}

    class WatchedModel(base):  # type: ignore[misc]
        def _linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
            product: Linear = super()._linear(weight, bias)
            name = by_tensor.get(id(weight))
            if name is None:
                return product
            sums = found[name]

            def watched(x: Tensor) -> Tensor:
                sums.add_(x.square().sum(0))
                return product(x)

            return watched

    model: TorchModel = WatchedModel(checkpoint)
    for text in filter(len, texts):
        states = model.new_states(1)
        for start in range(0, len(text), FED_AT_ONCE):
            tokens = torch.tensor(text[start : start + FED_AT_ONCE])
            model.forward(tokens, [len(tokens)], [0], states, [])
    return found
