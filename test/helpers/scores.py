"""Logprobs of prompts: texts, requests, and what the PyPI package `rwkv` says of them."""

import torch
from reference import Reference

from rwkv_batch.engine import Engine
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Event, GenerateRequest, Progress, RowDelta, Sampling

TEXTS = [
    "User: What is the capital of France?\n\nAssistant: Paris.",
    "你好世界🦄 " * 20,
    "x",
    "The quick brown fox jumps over the lazy dog. " * 9,
    "English: Good morning\n\nFrench: Bonjour",
]


def answers(engine: Engine, *requests: GenerateRequest) -> list[list[Event]]:
    """The events of each request."""
    found: dict[str, list[Event]] = {str(i): [] for i in range(len(requests))}
    for i, request in enumerate(requests):
        engine.add((b"test", str(i)), request)
    while engine.busy:
        for key, event in engine.step():
            found[key[1]].append(event)
    return list(found.values())


def scoring(prompt: str | list[int], number: int = 0, **fields) -> GenerateRequest:
    return GenerateRequest(
        id=str(number),
        prompts=[prompt],
        sampling=Sampling(temperature=0),
        **{"max_tokens": 0, "prompt_logprobs": 2} | fields,
    )


def rows_in(events: list[Event]) -> list[RowDelta]:
    return [row for event in events if isinstance(event, Progress) for row in event.rows]


def expected(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """Log probabilities `[tokens - 1, vocab]` in the places of all tokens but the first."""
    if len(tokens) < 2:
        return torch.empty(0, VOCABULARY)
    logits, _ = reference.model.forward(tokens[:-1], None, full_output=True)
    return logits.view(len(tokens) - 1, -1).double().log_softmax(-1)
