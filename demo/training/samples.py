"""What people paste first: prompts as the server sends them, with the answers that must come."""

import json
from pathlib import Path
from random import Random

from demo.training.example import Example

SAMPLES = Path(__file__).parents[1] / "samples.json"


def samples() -> list[Example]:
    """All of them, without a token in front."""
    return [
        Example(item["kind"], item["prompt"], item["answer"])
        for item in json.loads(SAMPLES.read_text(encoding="utf-8"))
    ]


ALL = tuple(samples())


def pasted(rng: Random) -> Example:
    """One of them. They are no evaluation: they must be right."""
    return rng.choice(ALL)
