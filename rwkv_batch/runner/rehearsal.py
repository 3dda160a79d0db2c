"""What every runner holds beside the model, and the rehearsal of the largest step."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rwkv_batch.sampling.logprobs import logprobs
from rwkv_batch.state.slots import States

# fp32 rows of logits that a step with logprobs of all rows holds at once, two fp16 ones counted as one.
LOGITS_COPIES = 8
# Of a GPU's memory, left free: cuBLAS workspaces, kernels loaded late, what an allocator cannot use.
RESERVE = 1 << 30


class Forward(Protocol):
    """A model; see model.rwkv7.RWKV7."""

    device: torch.device

    def forward(
        self, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], states: Any
    ) -> Tensor: ...


@torch.inference_mode()
def rehearse(model: Forward, states: States, rows: int, prefill_tokens: int) -> None:
    """Run the largest step that can come: every row decodes but one, which is fed all prompt tokens of a
    step; and all rows want logprobs. States are zero before and after. Raises RuntimeError when memory runs
    out.
    """
    lengths = [1] * (rows - 1) + [prefill_tokens + 1]
    logits = model.forward(torch.zeros(sum(lengths), dtype=torch.long), lengths, range(rows), states)
    drawn = torch.zeros(rows, dtype=torch.long, device=model.device)
    logprobs(logits.clone(), drawn, 1)  # of a copy, as in a step
    states.clear(range(rows))
