"""What every runner holds beside the model, and the warm-up: steps that are run before the first one."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.runner.protocol import Batch, NewRow, Runner
from rwkv_batch.sampling.logprobs import logprobs
from rwkv_batch.sampling.masks import RowMasks, mask_words
from rwkv_batch.sampling.prompt_logprobs import PromptScores, ScoredRow, scoring_bytes
from rwkv_batch.state.slots import States
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

# fp32 rows of logits that a step with logprobs of all rows holds at once, two fp16 ones counted as one.
LOGITS_COPIES = 8
FEW_ROWS = (1, 32, 128)  # for which the sampler launches all of its kernels
WAYS = Sampling(), Sampling(top_p=0.5)  # for which the sampler has kernels of their own
ALL_IDS = RowMasks([0], np.full((1, mask_words(VOCABULARY)), -1, np.int32))  # of the first row


def logits_bytes(shape: Checkpoint, rows: int, places: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most that a step holds of logits: those of prompts, of so many places at once, come first."""
    scoring = scoring_bytes(shape.vocab, shape.width, places, dtype, device)
    return max(scoring, rows * LOGITS_COPIES * 4 * shape.vocab)


@torch.inference_mode()
def run_largest_step(forward: Callable[..., Tensor], states: States, rows: int, prefill_tokens: int) -> None:
    """Run the largest step that can come. States are as before any token, before and after.

    Every row decodes but one, which is fed all prompt tokens of a step; and all rows want logprobs, this one
    of its prompt too.
    `forward`: as PackedForward.forward. Raises RuntimeError when memory runs out.
    """
    lengths = [1] * (rows - 1) + [prefill_tokens + 1]
    tokens = torch.zeros(sum(lengths), dtype=torch.long)
    scores = PromptScores({rows - 1: ScoredRow(0, [0] * prefill_tokens, 1)}, states.device)
    logits = forward(tokens, lengths, range(rows), states, scores=scores)
    drawn = torch.zeros(rows, dtype=torch.long, device=states.device)
    logprobs(logits.clone(), drawn, 1)  # of a copy, as in a step
    states.clear(range(rows))


def launch_all_kernels(runner: Runner, rows: int, few: bool = False) -> None:
    """Launch once what steps of up to so many rows launch. States are as before any token, before and after.

    few: only the steps of FEW_ROWS, where later captures launch what the others need besides.

    CUDA loads a kernel when it is first launched, and may wait for all that is queued to do so
    (CUDA C++ Programming Guide, "Lazy Loading"): in a step, every row would wait for two.
    """
    states, most = runner.states, min(rows, FEW_ROWS[-1]) if few else rows
    smaller = FEW_ROWS if few else [1 << power for power in range(most.bit_length())]
    for count in (*(count for count in smaller if count < most), most):
        slots = list(range(count))
        # Tokens of the first row: a prefill, and a decode step. All rows draw by either way of the sampler.
        for first, ways in (2, WAYS), (1, WAYS[::-1]):
            lengths = [first] + [1] * (count - 1)
            for draws, way in zip((slots, slots[::2]), ways, strict=True):
                for slot in slots:
                    runner.begin(slot, NewRow(way, 0, slot, ()))
                batch = Batch([0] * sum(lengths), lengths, slots, draws, {0: 1})
                for drawn in (runner.run(batch), runner.feed(batch)(ALL_IDS)):
                    drawn.wait()
                    drawn.logprobs()
        states.flush(slots)
    states.duplicate(0, rows - 1)
    states.clear(range(0, rows, 2))  # of which some are not neighbours
    states.clear(range(rows))
