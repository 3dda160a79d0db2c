"""The command line `python -m rwkv_batch.quantize in.pth out.safetensors --weights int8`.

It writes a model with its large matrices packed, as a file that --model-path takes and that is there at once:
nothing is packed when it is loaded, and its tensors are mapped.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import get_args

from rwkv_batch.config import EngineConfig, WeightsName
from rwkv_batch.evaluate.asks import EvaluationError, demand_texts, document
from rwkv_batch.evaluate.files import read_texts
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.quantization import packed_file
from rwkv_batch.model.quantization.calibrate import calibrated
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.runner.loading import load_weights, loading_bar

SUFFIX = ".safetensors"


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 2 for what cannot be read, packed or written."""
    args = _parser().parse_args(arguments)
    began = time.monotonic()
    try:
        _check_files(args.model, args.file)
        config = EngineConfig(
            model_path=args.model,
            adapter=args.adapter,
            adapter_alpha=args.adapter_alpha,
            adapter_scaling=args.adapter_scaling,
        )
        with loading_bar(args.model) as progress:
            source = load_weights(None, config, progress)
        if source.weights:
            raise CheckpointError(f"{args.model} is in {source.weights} already; give what it was made from.")
        with loading_bar(args.weights) as progress:
            if args.calibrate:
                demand_texts(source.vocab)
                texts = [document(text) for text in read_texts(args.calibrate)]
                model = calibrated(source, args.weights, texts, args.quantize_head, progress)
            else:
                model = quantize(source, args.weights, args.quantize_head, progress)
        packed_file.write(model, source.fingerprint, args.file)
    except (CheckpointError, EvaluationError) as error:
        print(error, file=sys.stderr)
        return 2
    size, before = args.file.stat().st_size, sum(tensor.nbytes for tensor in source.tensors.values())
    print(
        f"{args.file}: {model.weights}, {size / 1e6:.1f} MB in place of {before / 1e6:.1f} MB, fingerprint "
        f"{model.fingerprint} (of {source.fingerprint}), {time.monotonic() - began:.1f} s"
    )
    return 0


def _check_files(model: str, file: Path) -> None:
    """Before anything takes time. Raises CheckpointError."""
    if file.suffix != SUFFIX:
        raise CheckpointError(f"{file} should end in {SUFFIX}, by which the server knows what it is.")
    if not file.parent.is_dir():
        raise CheckpointError(f"There is no directory {file.parent} for {file.name}; make it first.")
    if file.exists() and file.samefile(model):
        raise CheckpointError(f"{file} is the model itself; give another name.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rwkv_batch.quantize",
        description="Write a model with its large matrices in fewer bits.",
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("model", metavar="IN", help="a checkpoint, as --model-path of app.py takes it")
    flag("file", metavar="OUT", type=Path, help=f"the file to write, which ends in {SUFFIX}")
    flag("--weights", required=True, choices=get_args(WeightsName), help="the format of the matrices")
    flag("--quantize-head", action=argparse.BooleanOptionalAction, help="as of app.py")
    flag("--adapter", metavar="FILE", help="is merged into the model before, as of app.py")
    flag("--adapter-alpha", type=float, metavar="X", help="as of app.py")
    flag("--adapter-scaling", type=float, metavar="X", help="as of app.py")
    flag(
        "--calibrate",
        type=Path,
        metavar="TEXT",
        help="for int4 and int4-128: a text, or JSONL with `text`, which the model reads first, so that what "
        "matters there is rounded less",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
