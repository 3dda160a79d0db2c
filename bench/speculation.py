#!/usr/bin/env python3
"""What drafts cost and gain on a CUDA GPU: steps that verify them, beside plain ones, without the engine.

A step of T tokens a row is measured beside a step of one. Then rows draw greedily behind drafts that are what
the model chooses, each token with probability p and else another one; their length is what gains most by the
times measured. Weights are random. What a draft itself costs is not counted, unless there is a draft model,
of random weights too: it guesses as many tokens in each step, and the time that this takes counts.

    python bench/speculation.py --size 7.2b
    python bench/speculation.py --size 7.2b --draft-size 0.1b
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decode import environment, need_gpu
from bench.make_checkpoint import SIZES, random_checkpoint
from rwkv_batch.model import checkpoint
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.graphs import decode_sizes
from rwkv_batch.model.cuda.steps.verify import MOST_ROWS, MOST_TOKENS
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.protocol import LAST, Batch, NewRow
from rwkv_batch.runner.speculation.cuda_draft_model import CudaDraftModel
from rwkv_batch.runner.speculation.verifiers import verifier_of
from rwkv_batch.wire.protocol import Sampling

MOST = 7  # tokens of a draft
ROWS = (1, 2, 4, 8)
CHANCES = (0.5, 0.75, 0.9)
RUNS = 15  # of a step that is timed
PLAIN = 60  # plain steps of a run, queued one behind the other
STEPS = 30  # with drafts, of each figure
GREEDY = Sampling(temperature=0)


class GreedyRows:
    """Rows that draw greedily, in the slots behind which as many keep where they were."""

    def __init__(self, runner: CudaRunner, rows: int) -> None:
        found = verifier_of(runner)
        assert found
        self.runner, self.verifier, self.rows, self.slots = runner, found, rows, list(range(rows))
        runner.states.clear(range(2 * MOST_ROWS))
        for slot in self.slots:
            runner.begin(slot, NewRow(GREEDY, 0, slot, ()))
        prompts = [[random.randrange(1, 65000) for _ in range(16)] for _ in self.slots]
        self.last = self.draw([token for prompt in prompts for token in prompt], 16)

    def draw(self, tokens: list[int], count: int = 1) -> list[int]:
        """What rows draw behind so many tokens each."""
        return self.runner.run(Batch(tokens, [count] * self.rows, self.slots, self.slots)).wait()

    def plain(self) -> float:
        """Seconds of a step, each queued before the one before it is known."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        batch = Batch([LAST] * self.rows, [1] * self.rows, self.slots, self.slots)
        draws = [self.runner.run(batch) for _ in range(PLAIN)]
        self.last = [each.wait() for each in draws][-1]
        return (time.perf_counter() - begin) / PLAIN

    def verify(self, drafts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Seconds of a step with these drafts until its draws are known, and what rows draw."""
        tokens = [token for last, draft in zip(self.last, drafts, strict=True) for token in (last, *draft)]
        batch = Batch(tokens, [1 + len(draft) for draft in drafts], self.slots, self.slots)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        draws = self.verifier.feed(batch, {row: len(draft) for row, draft in enumerate(drafts)})(None, {})
        ids, more = draws.wait(), draws.more()
        torch.cuda.synchronize()  # states of what was accepted have been copied
        seconds = time.perf_counter() - begin
        found = [[id_, *(token for token, _ in more[row])] for row, id_ in enumerate(ids)]
        self.last = [drawn[-1] for drawn in found]
        return seconds, found

    def choices(self, count: int) -> list[list[int]]:
        """What each row is about to draw; states are as before."""
        kept = {MOST_ROWS + slot: slot for slot in self.slots}
        self.runner.states.copy(kept)
        tokens, found = self.last, list[list[int]]()
        for _ in range(count):
            found.append(tokens := self.draw(tokens))
        self.runner.states.copy({slot: place for place, slot in kept.items()})
        return [list(each) for each in zip(*found, strict=True)]


class DraftedRows:
    """A draft model that makes guesses for such rows in every step."""

    def __init__(self, draft: CudaDraftModel, slots: list[int]) -> None:
        self._draft, self._slots = draft, slots
        for slot in slots:
            draft.begin(slot)
        draft.read({slot: [5] * 16 for slot in slots})

    def guess(self, known: list[list[int]], count: int) -> float:
        """Seconds of so many guesses for each row, behind tokens that are known, until the host has them."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._draft.first(dict(zip(self._slots, known, strict=True)), passes=count)
        return time.perf_counter() - begin


def wrong(tokens: list[int], chance: float) -> list[int]:
    """Each of these with that probability, else another one."""
    return [token if random.random() < chance else 1 + (token + 7) % 60000 for token in tokens]


def drawn_by(chance: float, count: int) -> float:
    """Tokens that a step draws on average for a row with a draft of so many."""
    return sum(chance**place for place in range(count + 1))


def random_draft(size: str) -> CudaDraftModel:
    """A draft model of that published size."""
    weights = checkpoint.from_tensors("draft", random_checkpoint(*SIZES[size], seed=1, device="cuda"))
    draft = CudaDraftModel(RWKV7Cuda(weights, "cuda", few_rows=True), MOST)
    draft.allocate(2 * MOST_ROWS)
    return draft


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="7.2b", help="a published size")
    parser.add_argument("--weights", default=None, help="int8, int4 ...; as of app.py")
    parser.add_argument("--batch-invariant", action="store_true", help="as of app.py; states are fp32 then")
    parser.add_argument("--draft-size", choices=SIZES, help="of a draft model, whose time counts")
    args = parser.parse_args()
    need_gpu()
    random.seed(1)
    began = time.monotonic()
    weights = checkpoint.from_tensors("random", random_checkpoint(*SIZES[args.size], device="cuda"))
    if args.weights:
        weights = quantize(weights, args.weights, None, device="cuda")
    torch.cuda.empty_cache()
    model = RWKV7Cuda(weights, "cuda", invariant=args.batch_invariant)
    del weights
    wkv = torch.float32 if args.batch_invariant else torch.float16
    runner = CudaRunner(model, wkv, "own", speculate=MOST)
    if model.tuner:
        model.tuner.measure(decode_sizes(MOST_TOKENS), progress=False)
    runner.allocate(MOST_ROWS, MOST_ROWS, 256, late=True)
    while runner.improve(False):
        pass
    draft = random_draft(args.draft_size) if args.draft_size else None
    torch.cuda.empty_cache()
    print(json.dumps(environment()))
    print(f"{args.size} {args.weights or 'fp16'}, states {wkv}; ready in {time.monotonic() - began:.0f} s")
    if draft:
        sizes = [draft.weight_bytes / 2**20, draft.bytes_needed / 2**20]
        print(f"draft model {args.draft_size}: {sizes[0]:.0f} MiB, and {sizes[1]:.0f} MiB counted beside")
    for rows in ROWS:
        of = GreedyRows(runner, rows)
        plain, seconds = statistics.median(of.plain() for _ in range(5)), dict[int, float]()
        for count in range(1, MOST + 1):
            drafts = [[5] * count for _ in of.slots]
            of.verify(drafts)
            seconds[count] = statistics.median(of.verify(drafts)[0] for _ in range(RUNS))
        shares = " ".join(f"{count + 1}:{took / plain:.2f}" for count, took in seconds.items())
        print(f"{rows} rows: plain step {plain * 1e3:.3f} ms, {rows / plain:.0f} tokens/s", flush=True)
        print(f"  steps of so many tokens a row, in plain steps: {shares}")
        drafted, guessing = DraftedRows(draft, of.slots) if draft else None, dict.fromkeys(seconds, 0.0)
        for count in seconds if drafted else ():
            assert drafted
            known = [[5] * (1 + count)] * rows  # as where all guesses were right
            drafted.guess(known, count)
            guessing[count] = statistics.median(drafted.guess(known, count) for _ in range(RUNS))
        if drafted:
            shares = " ".join(f"{count}:{took / plain:.2f}" for count, took in guessing.items())
            print(f"  so many guesses a row, in plain steps: {shares}")
        for chance in CHANCES:
            count = max(seconds, key=lambda each: drawn_by(chance, each) / (seconds[each] + guessing[each]))
            took, drawn, found = 0.0, 0, [[each] for each in of.last]
            for _ in range(STEPS):
                drafts = [wrong(each, chance) for each in of.choices(count)]
                took += drafted.guess(found, count) if drafted else 0.0
                more, found = of.verify(drafts)
                took, drawn = took + more, drawn + sum(map(len, found))
            print(
                f"  p {chance}: drafts of {count}, {drawn / STEPS / rows:.2f} tokens a step, "
                f"{drawn / took:.0f} tokens/s, {drawn / took * plain / rows:.2f} times",
                flush=True,
            )
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
