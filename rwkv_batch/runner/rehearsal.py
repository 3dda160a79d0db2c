"""What every runner holds beside the model, and the rehearsal of the largest step."""

from collections.abc import Callable

import torch
from torch import Tensor

from rwkv_batch.sampling.logprobs import logprobs
from rwkv_batch.state.slots import States

# fp32 rows of logits that a step with logprobs of all rows holds at once, two fp16 ones counted as one.
LOGITS_COPIES = 8
# Of a GPU's memory, left free: cuBLAS workspaces, kernels loaded late, what an allocator cannot use.
RESERVE = 1 << 30


@torch.inference_mode()
def rehearse(forward: Callable[..., Tensor], states: States, rows: int, prefill_tokens: int) -> None:
    """Run the largest step that can come. States are zero before and after.

    Every row decodes but one, which is fed all prompt tokens of a step; and all rows want logprobs.
    `forward`: see RWKV7.forward. Raises RuntimeError when memory runs out.
    """
    lengths = [1] * (rows - 1) + [prefill_tokens + 1]
    logits = forward(torch.zeros(sum(lengths), dtype=torch.long), lengths, range(rows), states)
    drawn = torch.zeros(rows, dtype=torch.long, device=states.device)
    logprobs(logits.clone(), drawn, 1)  # of a copy, as in a step
    states.clear(range(rows))
