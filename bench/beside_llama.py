#!/usr/bin/env python3
"""The engine on a CPU beside llama.cpp, with the same weights on the same cores, in turns.

    pip install llama-cpp-python gguf        # the first is compiled; it takes some minutes
    python bench/beside_llama.py             # the bundled model, and random weights of the 0.1B shape
    python bench/beside_llama.py --sizes 0.4b 1.5b --formats fp16 int4 --threads 2

Each side is a process of its own, and one works while the other sleeps. Both draw the most probable token of
each row: the engine as for any request, llama.cpp by one llama_decode a step and numpy's argmax. Formats are
fp16 beside F16, int8 beside Q8_0, int4 beside Q4_K_M. Logits of both are compared too, token by token.
"""

import argparse
import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import gguf_file  # noqa: E402
from bench.cpu_decode import machine  # noqa: E402
from bench.make_checkpoint import SIZES, random_checkpoint  # noqa: E402
from rwkv_batch.bundled import unpack  # noqa: E402
from rwkv_batch.engine.engine import Engine  # noqa: E402
from rwkv_batch.model.checkpoint import load  # noqa: E402
from rwkv_batch.model.rwkv7_cpu import CpuRWKV7  # noqa: E402
from rwkv_batch.ops.cpu import binding  # noqa: E402
from rwkv_batch.text.tokenizer import Tokenizer  # noqa: E402
from rwkv_batch.wire.protocol import Sampling  # noqa: E402

BUNDLED = "bundled"
FORMATS = {"fp16": None, "int8": 7, "int4": 15}  # by ours: the llama_ftype of MOSTLY_Q8_0 and MOSTLY_Q4_K_M
ROWS, DECODED, PROMPT = 16, 32, 512  # at once at most; tokens of a row; tokens of a prompt
WORK = (("1 row", 1, 1), (f"{ROWS} rows", ROWS, 1), (f"prompt of {PROMPT}", 1, PROMPT))
TEXT = "User: What is the capital of France?\n\nAssistant: The capital of France is Paris."
spawn = multiprocessing.get_context("spawn")


class Llama:
    """llama.cpp with one model and as many states as there are rows."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = ROWS * PROMPT * 2, PROMPT, PROMPT
        options.n_seq_max, options.n_threads, options.n_threads_batch = ROWS, threads, threads
        self._context = llama_cpp.llama_init_from_model(model, options)
        assert self._context, "llama.cpp does not load the file"
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def step(self, tokens: list[int], rows: list[int], positions: list[int], drawn: list[int]) -> np.ndarray:
        """Logits `[places that are drawn, vocab]` after these tokens of these rows."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, (token, row, position) in enumerate(zip(tokens, rows, positions, strict=True)):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0], batch.logits[place] = row, place in drawn
        failed = self._library.llama_decode(self._context, batch)
        assert not failed, f"llama_decode gives {failed}"
        found = (self._library.llama_get_logits_ith(self._context, place) for place in drawn)
        return np.stack([np.ctypeslib.as_array(each, (self.vocab,)) for each in found])

    def write(self, rows: int, prompt: int, count: int) -> None:
        """`count` tokens of as many rows, each behind its prompt."""
        self.clear()
        if prompt > 1:
            ids = _prompt(0, prompt)
            self.step(ids, [0] * prompt, list(range(prompt)), [prompt - 1]).argmax(1)
            return
        tokens = [_prompt(row, 1)[0] for row in range(rows)]
        for position in range(count):
            logits = self.step(tokens, list(range(rows)), [position] * rows, list(range(rows)))
            tokens = logits.argmax(1).tolist()

    def logits(self, ids: list[int]) -> np.ndarray:
        self.clear()
        return np.concatenate([self.step([each], [0], [at], [0]) for at, each in enumerate(ids)])


class Ours:
    """The engine, offline."""

    def __init__(self, path: str, weights: str, threads: int) -> None:
        self._engine = Engine(
            path,
            device="cpu",
            weights=None if weights == "fp16" else weights,
            threads=threads,
            max_rows=ROWS,
            l1=0,
            prefix_cache_mb=0,
        )

    def write(self, rows: int, prompt: int, count: int) -> None:
        prompts = [_prompt(row, prompt) for row in range(rows)]
        count = 1 if prompt > 1 else count
        found = self._engine.generate(
            prompts, sampling=Sampling(temperature=0), max_tokens=count, stop_ids=[]
        )
        assert sum(each.tokens for each in found) == rows * count


class OurModel:
    """The engine's model alone."""

    def __init__(self, path: str) -> None:
        self._model = CpuRWKV7(load(path), kernels=binding.load())

    def logits(self, ids: list[int]) -> np.ndarray:
        states = self._model.new_states(1)
        steps = [self._model.forward(torch.tensor([each]), [1], range(1), states) for each in ids]
        return torch.cat(steps).numpy()


class Competitor:
    """One of the two, in a process of its own that waits for work."""

    def __init__(self, make: type, *of: object) -> None:
        self._ours, theirs = spawn.Pipe()
        begun = time.perf_counter()
        self._process = spawn.Process(target=_serve, args=(theirs, make, of), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()
        self.started = time.perf_counter() - begun  # seconds, with Python and libraries
        self.seconds: dict[str, list[float]] = {name: [] for name, *_ in WORK}

    def do(self, name: str, *args: object) -> object:
        self._ours.send((name, args))
        return self._ours.recv()

    def measure(self, name: str, rows: int, prompt: int) -> None:
        begun = time.perf_counter()
        self.do("write", rows, prompt, DECODED)
        self.seconds[name].append(time.perf_counter() - begun)

    def end(self) -> int:
        """Most bytes of memory that it had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        self._ours.close()
        self._process.join()
        return int(status.split("VmHWM:")[1].split()[0]) << 10


def _serve(work: Connection, make: Callable[..., object], of: tuple[object, ...]) -> None:
    side = make(*of)
    work.send(None)
    while True:
        try:
            name, args = work.recv()
        except EOFError:
            return
        work.send(getattr(side, name)(*args))


def _prompt(row: int, length: int) -> list[int]:
    return torch.randint(1, 65000, (length,), generator=torch.Generator().manual_seed(row)).tolist()


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: object) -> None:
    """Write nothing of llama.cpp's log."""


def quantized(path: Path, ftype: int, threads: int) -> Path:
    """A GGUF file of fp16 in another format."""
    import llama_cpp

    llama_cpp.llama_log_set(_silent, ctypes.c_void_p())
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = ftype, threads
    target = path.with_suffix(f".{ftype}.gguf")
    failed = llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(options))
    assert not failed, "llama.cpp does not quantize the file"
    return target


def agreement(path: Path, llama: Competitor) -> str:
    """How far the logits of both are apart, in standard deviations, and how often the first is the same."""
    ids, ours = Tokenizer().encode(TEXT), Competitor(OurModel, str(path))
    mine, other = (np.asarray(side.do("logits", ids), np.float64) for side in (ours, llama))
    ours.end()
    apart = np.abs(mine - other[:, : mine.shape[1]]) / mine.std(1, keepdims=True)
    same = (mine.argmax(1) == other.argmax(1)).sum()
    far = f"{apart.mean():.1e} on average, {apart.max():.1e} at most"
    return f"{far}; the first is the same at {same} of {len(ids)}"


def ratios(ours: Competitor, llama: Competitor, rounds: int) -> str:
    """Cells of the table: seconds of llama.cpp over ours for the same work. One more round warms up."""
    for number in range(rounds + 1):
        for work in WORK:
            for side in (ours, llama) if number % 2 else (llama, ours):
                side.measure(*work)
    cells = []
    for name, *_ in WORK:
        times = [b / a for a, b in zip(ours.seconds[name], llama.seconds[name], strict=True)][1:]
        cells.append(f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=[BUNDLED, *SIZES], default=[BUNDLED, "0.1b"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {machine()}, load {os.getloadavg()[0]:.1f}\n")
    names = " | ".join(f"{name}, times" for name, *_ in WORK)
    print(f"| model | format | {names} | memory, MB | of llama.cpp | start, s | of llama.cpp |")
    print("|---|---" + "|---" * len(WORK) + "|---|---|---|---|", flush=True)
    apart = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{size}.pth"
            tensors = unpack.tensors() if size == BUNDLED else random_checkpoint(*SIZES[size])
            torch.save({name: tensor.half() for name, tensor in tensors.items()}, path)  # the same numbers
            plain = Path(folder) / f"{size}.gguf"
            gguf_file.write(load(path), plain)
            for weights in args.formats:
                ftype = FORMATS[weights]
                file = quantized(plain, ftype, args.threads) if ftype else plain
                ours = Competitor(Ours, str(path), weights, args.threads)
                llama = Competitor(Llama, str(file), args.threads)
                if not ftype:
                    apart.append(f"- {size}: {agreement(path, llama)}")
                cells = ratios(ours, llama, args.rounds)
                memory = " | ".join(str(side.end() >> 20) for side in (ours, llama))
                print(
                    f"| {size} | {weights} | {cells} | {memory} | {ours.started:.1f} | {llama.started:.1f} |",
                    flush=True,
                )
    print("\nLogits of both, in standard deviations apart:\n\n" + "\n".join(apart))


if __name__ == "__main__":
    main()
