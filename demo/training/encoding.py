"""Examples as token ids.

A name is one sequence of tokens after a space and another without one. So that a copied name needs no spelling,
an answer repeats the tokens of the prompt, and only the first of them gains or loses its space.
"""

from functools import cache

from demo.training.conversation import END
from demo.training.example import Example
from rwkv_batch.text.tokenizer import VOCABULARY, Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer()


@cache
def ids_of_bytes() -> dict[bytes, int]:
    return {tokenizer().token_bytes(token): token for token in range(1, VOCABULARY)}


def prompt_ids(example: Example) -> list[int]:
    parts = example.parts or (example.prompt,)
    return [*example.lead, *(token for part in parts for token in tokenizer().encode(part))]


def answer_ids(example: Example) -> list[int]:
    """The answer and END."""
    ids: list[int] = []
    rest, before = example.answer, ""
    for at, name in sorted((rest.find(name), name) for name in set(example.names) if name in rest):
        place = at - (len(example.answer) - len(rest))
        there = example.prompt.find(name)
        if place < 0 or there < 0:
            continue
        before = rest[:place]
        spaced = before.endswith(" ") or (not before and bool(ids) and example.answer[at - 1] == " ")
        copied = realigned(name, example.prompt[there - 1 : there] == " ", spaced)
        if copied is None:
            continue
        ids += tokenizer().encode(before.removesuffix(" ") if spaced else before) + copied
        rest = rest[place + len(name) :]
    return [*ids, *tokenizer().encode(rest), END]


def realigned(name: str, had_space: bool, has_space: bool) -> list[int] | None:
    """The tokens of a name in the answer, its space included; None where they are those of its text anyway."""
    if had_space == has_space:
        return None
    first, *others = tokenizer().encode(f" {name}" if had_space else name)
    data = tokenizer().token_bytes(first)
    if had_space:
        plain = ids_of_bytes().get(data[1:])
        try:
            return [*([plain] if plain else tokenizer().encode(data[1:].decode())), *others]
        except UnicodeDecodeError:  # half a character has no tokens of its own
            return None
    spaced = ids_of_bytes().get(b" " + data)
    return [spaced, *others] if spaced else [ids_of_bytes()[b" "], first, *others]
