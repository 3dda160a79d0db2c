"""Logprobs of prompts on a CUDA GPU in fp16, against the PyPI package `rwkv` in fp32."""

import pytest
from cuda_gpu import needs_gpu
from scores import TEXTS, answers, expected, rows_in, scoring

from rwkv_batch.engine import Engine
from rwkv_batch.wire.protocol import GenerateRequest

pytestmark = [*needs_gpu, pytest.mark.many_launches]
MEAN, MOST = 0.02, 0.15  # of the errors, with logits of some tens in fp16


@pytest.mark.parametrize("prefill_tokens", [1, 48, 4096])  # 1: by the graphs of decode steps
def test_prompts_have_the_packages_logprobs(reference, prefill_tokens):
    engine = Engine(device="cuda", max_rows=4, prefill_tokens=prefill_tokens, prefix_cache_mb=0)
    texts = [*TEXTS, "The quick brown fox jumps over the lazy dog. " * 70]
    requests = [scoring(text, i, max_tokens=i % 2, prompt_logprobs=i % 3) for i, text in enumerate(texts)]
    beside = GenerateRequest(id=str(len(texts)), prompts=[TEXTS[0]], max_tokens=40)
    found = answers(engine, *requests, beside)
    errors = []
    for i, (text, events) in enumerate(zip(texts, found, strict=False)):
        tokens = reference.tokenizer.encode(text)
        (row,) = rows_in(events)
        assert len(row.prompt) == len(tokens) - 1
        lines = expected(reference, tokens)
        for entry, line, token in zip(row.prompt, lines, tokens[1:], strict=True):
            assert entry.token == reference.tokenizer.token_bytes(token)
            errors.append(abs(entry.logprob - float(line[token])))
            assert len(entry.top) == i % 3
            best = sorted(line.topk(2).values.tolist(), reverse=True)[: i % 3]
            assert [p for _, p in entry.top] == pytest.approx(best, abs=MOST)
    assert max(errors) < MOST and sum(errors) / len(errors) < MEAN
    assert not any(row.prompt for row in rows_in(found[-1]))
    engine.close()


def test_how_a_prompt_is_cut_hardly_matters(reference):
    """Chunks of other lengths, and the places of the last chunk only."""
    text = reference.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 30)
    found = []
    for prefill_tokens in (16, 4096):
        engine = Engine(device="cuda", max_rows=2, prefill_tokens=prefill_tokens, prefix_cache_mb=0)
        whole, late = (
            rows_in(events)[0].prompt
            for events in answers(engine, scoring(text, 0), scoring(text, 1, scored_from=len(text) - 5))
        )
        assert [entry.logprob for entry in late] == pytest.approx(
            [entry.logprob for entry in whole[-5:]], abs=MOST
        )
        found.append([entry.logprob for entry in whole])
        engine.close()
    assert found[0] == pytest.approx(found[1], abs=MOST)
