"""What the parts of an engine have in common."""

from dataclasses import dataclass

from rwkv_batch.engine.rows.rows import Rows
from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.prompts import PromptEncoder
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.text.tokenizer import Tokenizer
from state_pool import StatePool


@dataclass(frozen=True)
class EngineParts:
    """One of each for a model, from the engine's start to its end.

    Who is made with an engine gets all of them, and takes what it needs: which parts know which is then not
    written down twice, where they are made and in `Engine`.
    """

    weights: Checkpoint
    runner: Runner
    tokenizer: Tokenizer
    prompts: PromptEncoder
    scheduler: Scheduler
    counts: EngineCounts
    rows: Rows
    pool: StatePool
