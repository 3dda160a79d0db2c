"""Train the draft of the bundled model: two layers of half its width, over fewer known ids.

python -m demo.training.draft --cpu --tokens 2048 --seconds 1800 --out demo/draft.safetensors

Greedy decoding of the bundled model gives the answers of its training text in 97 to 100 of 100 cases, so they
are what its draft learns. Embedding and head begin with the directions in which those of the bundled model
differ most. Every call can be cut off and goes on, as those of demo/training/train.py.
"""

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from demo.training.evaluate import tasks
from demo.training.model import TrainingModel
from demo.training.text import training_example
from demo.training.train import SEED, TrainingTask, arguments, finish, train
from demo.training.vocabulary import collect
from rwkv_batch.bundled.codes import SIZE, rows
from rwkv_batch.bundled.unpack import KNOWN, MODEL

LAYERS, WIDTH = 2, 128
KNOWN_IDS, SAMPLE, CANDIDATES = 4096, 8000, 6144  # as in vocabulary.py and batches.py, where they are more


def begun(known: np.ndarray) -> TrainingModel:
    """Before the first step, over these ids."""
    packed, made = load_file(MODEL), TrainingModel(known, LAYERS, WIDTH)
    places = rows(packed[KNOWN].numpy())[[*known, SIZE - 1]]  # the last one is that of all other ids
    with torch.no_grad():
        for table, name, code in (
            (made.emb, "emb.weight", "code_in"),
            (made.head, "head.weight", "code_out"),
        ):
            found = _read(packed, name)[places]
            directions = torch.linalg.svd(found, full_matrices=False).Vh[:WIDTH].T  # [wider, WIDTH]
            table.weight.copy_(found @ directions)
            getattr(made, code).copy_(_read(packed, code) @ directions)
    return made


def _read(packed: dict[str, Tensor], name: str) -> Tensor:
    return packed[name].float() * packed[f"{name}.scale"]


def main() -> None:
    args = arguments(__doc__, seconds=1800, rate=4e-3).parse_args()
    args.state = args.state or args.out.with_suffix(".state")
    known = collect(SEED, KNOWN_IDS, SAMPLE)
    train(args, TrainingTask(known, begun, training_example, finish, tasks, CANDIDATES))


if __name__ == "__main__":
    main()
