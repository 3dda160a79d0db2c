"""16-bit weights: each number rounded by itself."""

import torch
from torch import Tensor

from rwkv_batch.ops.weights.weight import PartLayout, Weight


class HalfWeight(Weight):
    """Each number rounded to the nearest of `dtype`, ties to even; too large ones to the largest."""

    dtype: torch.dtype

    @classmethod
    def layout(cls, outputs: int, inputs: int) -> dict[str, PartLayout]:
        return {"values": PartLayout(cls.dtype, (outputs, inputs))}

    @classmethod
    def pack_rows(cls, rows: Tensor) -> dict[str, Tensor]:
        most = torch.finfo(cls.dtype).max
        return {"values": rows.clamp(-most, most).to(cls.dtype)}

    def read_rows(self, rows: slice) -> Tensor:
        return self.parts["values"][rows].float()


class Fp16Weight(HalfWeight):
    """IEEE half precision: 11 bits of precision, and none below 6e-8."""

    format, dtype = "fp16", torch.float16


class Bf16Weight(HalfWeight):
    """bfloat16: 8 bits of precision, and the range of fp32."""

    format, dtype = "bf16", torch.bfloat16
