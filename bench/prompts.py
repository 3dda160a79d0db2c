"""Prompts of the load: from a file, or random words of an exact number of tokens."""

import functools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pyrwkv_tokenizer


@dataclass(frozen=True)
class Prompts:
    """Prompt number i, the same for the same seed.

    With `length` 0 `parts` are whole prompts; otherwise they are words to draw from.
    """

    parts: list[str]
    length: int = 0
    seed: int = 0

    def __getitem__(self, index: int) -> str:
        if not self.length:
            return self.parts[index % len(self.parts)]
        return "".join(random.Random(f"{self.seed}/{index}").choices(self.parts, k=self.length))


def from_file(path: str) -> Prompts:
    """One prompt a line; in a .jsonl file the "prompt" of the object on each line.

    Raises ValueError with a sentence for the user.
    """
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error}.") from None
    if path.endswith(".jsonl"):
        lines = [_read_prompt(line, path) for line in lines]
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompts; put one on each line.")
    return Prompts(lines)


def _read_prompt(line: str, path: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(
            f'--prompts {path}: every line must be a JSON object with a string "prompt", not {line[:60]}.'
        )
    return prompt


def random_prompts(tokens: int, seed: int) -> Prompts:
    """Random prompts of exactly `tokens` tokens of the World vocabulary, all different.

    The words are single tokens that begin with a space. The tokenizer takes the longest match, so a word that
    is the beginning of a token with a second space is left out: no two words then merge, and the count is
    exact.
    """
    vocabulary = _tokenizer().get_vocab()
    merging = {f" {head}" for token in vocabulary for head in re.findall(r"^ ([a-z]+) ", token)}
    words = sorted(
        token for token in vocabulary if re.fullmatch(r" [a-z]{3,12}", token) and token not in merging
    )
    return Prompts(words, tokens, seed)


def token_count(text: str) -> int:
    """Tokens of a text in the World vocabulary."""
    return len(_tokenizer().encode(text)) if text else 0


@functools.cache
def _tokenizer() -> pyrwkv_tokenizer.RWKVTokenizer:
    return pyrwkv_tokenizer.RWKVTokenizer()
