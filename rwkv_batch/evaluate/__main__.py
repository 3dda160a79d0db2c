"""The command line: `python -m rwkv_batch.evaluate lambada lambada_test.jsonl --model-path P`."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

from rwkv_batch.config import ActivationsName, EngineConfig, WeightsName
from rwkv_batch.engine import Engine
from rwkv_batch.evaluate.asks import AskedModel, EvaluationError, demand_texts, document
from rwkv_batch.evaluate.compare import compare, held_out, texts_of
from rwkv_batch.evaluate.files import read_lines, read_texts
from rwkv_batch.evaluate.lambada import lambada, passage
from rwkv_batch.evaluate.local import LocalModel
from rwkv_batch.evaluate.mmlu import mmlu, multiple_choice
from rwkv_batch.evaluate.next_token import PROMPTS, next_token
from rwkv_batch.evaluate.perplexity import perplexity
from rwkv_batch.evaluate.questions import determinism, generate, random_questions
from rwkv_batch.evaluate.remote import RemoteModel
from rwkv_batch.evaluate.report import Result, stamp, table, write_jsonl
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.loading import load_weights, loading_bar
from rwkv_batch.wire.protocol import Sampling

Run = Callable[[AskedModel, argparse.Namespace], Result]
Evaluation = Callable[[argparse.Namespace], tuple[str, float, Result]]  # the model's name, and when it began
FORMATS_COMPARED = "fp16,int8,fp8,int4"


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where answers differ that should not, 2 for what cannot be evaluated."""
    args = _parser().parse_args(arguments)
    run: Evaluation = args.run
    judge: Callable[[Result], int] = args.judge
    try:
        name, began, result = run(args)
    except (EvaluationError, CheckpointError, DeviceError) as error:
        print(error, file=sys.stderr)
        return 2
    summary = {"task": args.task, "model": name, **result.summary}
    print(f"{name}, {time.monotonic() - began:.1f} s\n")
    print("\n\n".join(map(table, result.tables)))
    if file := args.jsonl or args.jsonl_unless:
        try:
            write_jsonl(file, result.records, summary)
        except OSError as error:
            print(f"{file} cannot be written ({error.strerror}).", file=sys.stderr)
            return 2
        print(f"\n{len(result.records)} records are in {file}")
    return judge(result)


def _ask(run: Run, args: argparse.Namespace) -> tuple[str, float, Result]:
    model, began = _open(args), time.monotonic()
    return model.name, began, run(model, args)


def _compare(args: argparse.Namespace) -> tuple[str, float, Result]:
    """Formats against fp32. Raises EvaluationError."""
    formats = args.weights.split(",")
    for name in formats:
        if name not in get_args(WeightsName):
            raise EvaluationError(f"--weights: there is no {name}; use {', '.join(get_args(WeightsName))}.")
    with loading_bar(args.model_path or "") as bar:
        weights = load_weights(args.model_path, EngineConfig(), bar)
    if weights.weights:
        raise EvaluationError(f"{weights.name} is in {weights.weights} already; give what it was made from.")
    demand_texts(weights.vocab)
    if args.file:
        texts = texts_of(read_texts(args.file), args.tokens)
    elif args.model_path:
        raise EvaluationError("There is no text to read; name a file.")
    else:
        texts = held_out(args.tokens)
    began = time.monotonic()
    name = f"{weights.name} ({weights.fingerprint}) on cpu"
    calibration = [document(text) for text in read_texts(args.calibrate)] if args.calibrate else []
    fp8 = args.activations is not None
    return name, began, compare(weights, texts, formats, args.quantize_head, calibration, fp8)


def _open(args: argparse.Namespace) -> AskedModel:
    if args.url:
        return RemoteModel(args.url, args.password, args.model, args.concurrency)
    config = EngineConfig(
        model_path=args.model_path,
        device=args.device,
        backend=args.backend,
        max_rows=args.max_rows,
        prefill_tokens=args.prefill_tokens,
        wkv=args.wkv,
        batch_invariant=args.batch_invariant,
        l1=0,
        l2=0,
        prefix_cache_mb=0,
    )
    return LocalModel(Engine(config=config))


def _run_lambada(model: AskedModel, args: argparse.Namespace) -> Result:
    return lambada(model, read_lines(args.file, passage, args.limit))


def _run_mmlu(model: AskedModel, args: argparse.Namespace) -> Result:
    return mmlu(model, read_lines(args.file, multiple_choice, args.limit))


def _run_perplexity(model: AskedModel, args: argparse.Namespace) -> Result:
    return perplexity(model, read_texts(args.file, args.limit))


def _run_next_token(model: AskedModel, args: argparse.Namespace) -> Result:
    return next_token(model, args.prompt or PROMPTS, args.top)


def _run_generate(model: AskedModel, args: argparse.Namespace) -> Result:
    questions = random_questions(args.count, args.seed)
    return generate(model, questions, args.max_tokens, _sampling(args), args.seed)


def _run_determinism(model: AskedModel, args: argparse.Namespace) -> Result:
    questions = random_questions(args.count, args.seed)
    return determinism(model, questions, args.max_tokens, _sampling(args), args.seed)


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(temperature=args.temperature, top_p=args.top_p)


def _all_the_same(result: Result) -> int:
    counts = result.summary
    same = counts["same_in_two_runs"] == counts["same_alone_and_batched"] == counts["questions"]
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rwkv_batch.evaluate", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    where = _where()

    def add(name: str, run: Run, what: str, file: str = "") -> argparse.ArgumentParser:
        task = tasks.add_parser(name, parents=[where], help=what, description=what)
        task.set_defaults(run=partial(_ask, run), judge=lambda result: 0, jsonl_unless=None)
        if file:
            task.add_argument("file", type=Path, metavar="FILE", help=file)
            task.add_argument("--limit", type=_positive, metavar="N", help="the first N examples only")
        return task

    task = add("next-token", _run_next_token, "the likeliest next tokens after prompts")
    task.add_argument("prompt", nargs="*", help="read as it is; without one: some of ours")
    task.add_argument("--top", type=_positive, default=5, metavar="K", help="how many tokens (5)")
    add("lambada", _run_lambada, "last words of passages", 'JSONL with "text"')
    add("mmlu", _run_mmlu, "multiple choice", 'JSONL with "question", "choices", "answer", "subject"')
    add("perplexity", _run_perplexity, "perplexity of texts", 'JSONL with "text", or a text')
    task = add("generate", _run_generate, "answers to random questions, as JSONL")
    task.set_defaults(jsonl_unless=Path(f"answers_{stamp()}.jsonl"))
    _add_sampling(task, count=128, max_tokens=150)
    what = "weight formats against fp32, on a CPU"
    task = tasks.add_parser("compare", help=what, description=what)
    task.set_defaults(run=_compare, judge=lambda result: 0, jsonl_unless=None)
    task.add_argument("file", type=Path, nargs="?", metavar="FILE", help='JSONL with "text", or a text')
    task.add_argument("--weights", default=FORMATS_COMPARED, metavar="LIST", help=f"({FORMATS_COMPARED})")
    task.add_argument("--quantize-head", action=argparse.BooleanOptionalAction, help="as of app.py")
    what = "int8, int4 and int4-128 with them too, as of app.py, computed by rounding"
    task.add_argument("--activations", choices=get_args(ActivationsName), help=what)
    task.add_argument("--calibrate", type=Path, metavar="TEXT", help="int4 by this text too, as of quantize")
    task.add_argument("--tokens", type=_positive, default=1000, metavar="N", help="that count (1000)")
    task.add_argument("--model-path", metavar="P", help="as for app.py; without it: the bundled model")
    task.add_argument("--jsonl", type=Path, metavar="FILE", help="a record for each format")
    task = add("determinism", _run_determinism, "the same questions twice with one seed, and each alone")
    task.set_defaults(judge=_all_the_same)
    _add_sampling(task, count=32, max_tokens=64)
    return parser


def _where() -> argparse.ArgumentParser:
    """The flags of all tasks: which model."""
    where = argparse.ArgumentParser(add_help=False)
    what = "a record for each example, the summary last"
    where.add_argument("--jsonl", type=Path, metavar="FILE", help=what)
    here = where.add_argument_group("a model in this process")
    here.add_argument("--model-path", metavar="P", help="as for app.py; without it: the bundled model")
    here.add_argument("--device", default="auto")
    here.add_argument("--backend", default="auto", choices=("auto", "torch", "portable"))
    here.add_argument("--max-rows", type=_positive, metavar="N")
    here.add_argument("--prefill-tokens", type=_positive, metavar="N")
    here.add_argument("--wkv", choices=("fp16", "fp32"))
    here.add_argument("--batch-invariant", action="store_true")
    there = where.add_argument_group("a model behind a URL")
    there.add_argument("--url", help="such as http://127.0.0.1:8000")
    there.add_argument("--password", metavar="W")
    there.add_argument("--model", default="", metavar="NAME", help="without it: the server's first")
    there.add_argument("--concurrency", type=_positive, default=8, metavar="N", help="requests at a time (8)")
    return where


def _add_sampling(task: argparse.ArgumentParser, count: int, max_tokens: int) -> None:
    task.add_argument("--count", type=_positive, default=count, metavar="N", help=f"questions ({count})")
    task.add_argument("--max-tokens", type=_positive, default=max_tokens, metavar="N", help=f"({max_tokens})")
    task.add_argument("--temperature", type=float, default=1.0, metavar="X", help="(1)")
    task.add_argument("--top-p", type=float, default=0.6, metavar="X", help="(0.6)")
    task.add_argument("--seed", type=int, default=42, metavar="N", help="(42)")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
