"""What a step writes besides states and logits, in one arena that steps of all sizes share."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import SPARSE_SPLITS
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS, CodedRows

MIXED = 6  # token-shifted inputs of a time mix
MAX_SPLITS = 4  # partial sums of a GEMM with split-K
SPLIT_TOKENS = 512  # tokens for which K is split, at most: more fill the multiprocessors


@dataclass(frozen=True)
class BufferShape:
    """What decides the sizes of buffers."""

    width: int
    hidden: int  # units of the channel mix
    ranks: dict[str, int]  # of the low-rank functions, by name
    device: torch.device
    fp8: bool = False  # whether many rows are multiplied in fp8


class StepBuffers:
    """The buffers of a step over `tokens` tokens; they overlap those of other steps in the same arena."""

    x_between: Tensor  # the stream between the two norms of a prefill's layer, fp32 [tokens, C]

    def __init__(
        self, shape: BufferShape, tokens: int, arena: dict[str, Tensor], packed: bool = False
    ) -> None:
        """packed: of a prefill."""
        self.arena, self.device = arena, shape.device
        width = shape.width
        self.x = self._take("x", tokens, width, dtype=torch.float32)  # the residual stream
        # Tokens and slots, and how far their states lag: what Feed.resolve fills in.
        fed = self._take("fed", 2, tokens, dtype=torch.int32)
        self.fed = fed[0], fed[1]
        self.lag = self._take("lag", tokens, dtype=torch.int32)
        self.normed = self._take("normed", tokens, width)
        self.y = self._take("y", tokens, width)  # what the time mix reads out
        self.out = self._take("out", tokens, width)  # what is added to x
        self.hidden = self._take("hidden", tokens, shape.hidden)

    @property
    def v_first(self) -> Tensor | None:
        """The values of layer 0 `[tokens, C]`, where other layers read them."""
        return None

    def scratch(self, name: str, size: int) -> Tensor:
        """`[size]` bytes that one kernel hands to the next; steps of any size may overwrite them."""
        return self._take(name, size, dtype=torch.uint8)

    def _take(self, name: str, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        size = torch.Size(shape).numel()
        flat = self.arena.get(name)
        if flat is None or len(flat) < size:
            flat = self.arena[name] = torch.empty(size, device=self.device, dtype=dtype)
        return flat[:size].view(shape)


class Buffers(StepBuffers):
    """Those of RWKV-7. A prefill has no partial sums of split-K."""

    def __init__(
        self, shape: BufferShape, tokens: int, arena: dict[str, Tensor], packed: bool = False
    ) -> None:
        super().__init__(shape, tokens, arena, packed)
        width = shape.width
        self.mixed = self._take("mixed", MIXED, tokens, width)  # in the order of MIXES
        self.rkv0 = self._take("rkv0", 3, tokens, width)  # of layer 0, whose v the others mix in
        self.rkv = self._take("rkv", 3, tokens, width)
        self.low = {name: self._take("low " + name, tokens, rank) for name, rank in shape.ranks.items()}
        self.low_out = {name: self._take("low out " + name, tokens, width) for name in shape.ranks}
        # The stream between the two norms of a prefill's layer; hidden units are written only after that.
        self.x_between = self.hidden.view(-1)[: 2 * tokens * width].view(torch.float32).view(tokens, width)
        few = min(tokens, SPARSE_ROWS[-1])
        self.sparse_partials = self._take("sparse partials", SPARSE_SPLITS, few, width, dtype=torch.float32)
        splits, some = 0 if packed else MAX_SPLITS, min(tokens, SPLIT_TOKENS)
        # What a GEMM of fp8 reads, made by `quantize_rows` or a norm.
        self.codes = self._take("codes", tokens * shape.hidden if shape.fp8 else 0, dtype=torch.uint8)
        self.code_scales = self._take("code scales", 3 * tokens if shape.fp8 else 0, dtype=torch.float32)
        self.split_partials = self._take("split partials", splits, some, width, dtype=torch.float32)

    @property
    def v_first(self) -> Tensor:
        return self.rkv0[2]

    def fp8_rows(self, count: int, width: int) -> CodedRows:
        """Where `count` times the step's rows go as fp8: codes `[count, tokens, width]`, scales."""
        tokens = len(self.x)
        codes, scales = self.codes[: count * tokens * width], self.code_scales[: count * tokens]
        return codes.view(count, tokens, width), scales.view(count, tokens)


class Rwkv6Buffers(StepBuffers):
    """Those of RWKV-6. Only a prefill has a stream between the two norms of a layer."""

    def __init__(
        self, shape: BufferShape, tokens: int, arena: dict[str, Tensor], packed: bool = False
    ) -> None:
        super().__init__(shape, tokens, arena, packed)
        width, rank = shape.width, shape.ranks["mix"]
        self.mixed = self._take("mixed", 3, tokens, width)  # a norm's results
        self.inner = self._take("inner", tokens, 5, rank)
        self.shifted = self._take("shifted", 5, tokens, width)  # in the order of RWKV6_MIXES
        self.kvrg = self._take("kvrg", 4, tokens, width)
        self.decay_inner = self._take("decay inner", tokens, shape.ranks["decay"])
        self.decay = self._take("decay", tokens, width)
        self.x_between = self._take("x between", tokens if packed else 0, width, dtype=torch.float32)


def buffer_bytes(
    shape: BufferShape, tokens: int, packed: bool = False, kind: type[StepBuffers] = Buffers
) -> int:
    """What the buffers of a step over that many tokens take. Nothing is allocated to find out."""
    arena: dict[str, Tensor] = {}
    kind(replace(shape, device=torch.device("meta")), tokens, arena, packed)
    return sum(tensor.nbytes for tensor in arena.values())
