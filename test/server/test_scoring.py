"""What evaluation clients send, against the PyPI package `rwkv`: echo with logprobs, and the vocabulary."""

from functools import cache

import httpx
import pytest
import torch
from openai import OpenAI
from reference import Reference
from scores import expected
from serving import Server, events

CLOSE = 1e-3
QUESTIONS = [  # a context and how it goes on
    ("User: What is the capital of France?\n\nAssistant:", " Paris."),
    ("User: What is the capital of France?\n\nAssistant:", " London."),
    ("English: Good morning\n\nFrench:", " Bonjour"),
    ("你好", "世界🦄"),
    ("The quick brown fox jumps over the lazy dog. " * 40, "The end"),
]


def until_end(drawn: list[int]) -> list[int]:
    """With the id that ends the text."""
    return drawn[: drawn.index(0) + 1] if 0 in drawn else drawn


def complete(server: Server, **body) -> dict:
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@cache
def expected_after(reference: Reference, begin: int, tokens: tuple[int, ...]) -> torch.Tensor:
    """What `expected` gives, from the place `begin` on."""
    return expected(reference, list(tokens))[begin - 1 :].clone()


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_log_likelihoods_as_the_evaluation_harness_asks_for_them(server, reference, as_tokens, together):
    """One token is drawn, and the entries of the continuation are all but the last."""
    encode = reference.tokenizer.encode
    contexts = [encode(context) for context, _ in QUESTIONS]
    wholes = [encode(context) + encode(continuation) for context, continuation in QUESTIONS]
    prompts = wholes if as_tokens else [reference.tokenizer.decode(whole) for whole in wholes]
    asks = [prompts] if together else [[prompt] for prompt in prompts]
    body = {"model": "rwkv7", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = [choice for ask in asks for choice in complete(server, prompt=ask, **body)["choices"]]
    assert [choice["index"] for choice in choices] == (list(range(5)) if together else [0] * 5)
    for context, whole, choice in zip(contexts, wholes, choices, strict=True):
        if not as_tokens:  # the text may be encoded otherwise where the parts meet
            whole = encode(reference.tokenizer.decode(whole))
        given, begin = choice["logprobs"], len(context)
        lines = expected_after(reference, begin, tuple(whole))
        wanted = [float(line[token]) for line, token in zip(lines, whole[begin:], strict=True)]
        assert given["token_logprobs"][0] is None and given["top_logprobs"][0] is None
        assert sum(given["token_logprobs"][begin:-1]) == pytest.approx(sum(wanted), abs=CLOSE * len(wanted))
        assert given["token_logprobs"][begin:-1] == pytest.approx(wanted, abs=CLOSE)
        greedy = [
            logprob == max(top.values())
            for logprob, top in zip(given["token_logprobs"], given["top_logprobs"], strict=True)
            if logprob is not None
        ]
        for line, token, said in zip(lines, whole[begin:], greedy[begin - 1 : -1], strict=True):
            first, second = line.topk(2).values.tolist()
            assert first - second < CLOSE or said == (int(line.argmax()) == token)


def test_an_echoed_text_and_its_tokens_belong_together(server, reference):
    text = "User: Hi 世界🦄\n\nAssistant:"
    for prompt in (text, reference.tokenizer.encode(text)):
        (choice,) = complete(server, prompt=prompt, echo=True, logprobs=2, max_tokens=4, temperature=0)[
            "choices"
        ]
        given = choice["logprobs"]
        assert choice["text"].startswith(text) and len(choice["text"]) > len(text)
        assert len({len(column) for column in given.values()}) == 1
        for token, following, place, end in zip(
            given["tokens"],
            given["tokens"][1:],
            given["text_offset"],
            [*given["text_offset"][1:], len(choice["text"])],
            strict=False,
        ):
            if not token.startswith("bytes:") and not following.startswith("bytes:"):
                assert choice["text"][place:end] == token
        assert all(len(top) in (2, 3) for top in given["top_logprobs"][1:])
    (plain,) = complete(server, prompt=[33155], echo=True, max_tokens=0)["choices"]
    assert plain["text"] == reference.tokenizer.decode([33155]) and plain["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_stream_says_what_the_whole_reply_says(server, max_tokens):
    body = {
        "prompt": ["The capital of France is", "你好🦄"],
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "temperature": 0,
        "n": 2,
        "return_token_ids": True,
    }
    whole = complete(server, **body)
    joined: dict[int, dict] = {}
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=60
    ) as response:
        for event in events(response):
            for choice in event["choices"] if isinstance(event, dict) else ():
                old = joined.setdefault(choice["index"], choice)
                if old is not choice:
                    assert "prompt_token_ids" not in choice
                    old["text"] += choice["text"]
                    old["token_ids"] += choice["token_ids"]
                    old["finish_reason"] = choice["finish_reason"]
                    for name, column in choice["logprobs"].items():
                        old["logprobs"][name] += column
    assert [joined[i] for i in range(4)] == whole["choices"]
    assert whole["usage"]["completion_tokens"] <= 4 * max_tokens


def test_ids_are_echoed_as_their_text_in_a_stream_too(server, reference):
    texts = ["The capital of France is", "你好🦄"]
    body = {
        "prompt": list(map(reference.tokenizer.encode, texts)),
        "echo": True,
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
    }
    shown = ["", ""]
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        for event in events(response):
            for choice in event["choices"] if isinstance(event, dict) else ():
                assert choice["logprobs"] is None and "token_ids" not in choice
                shown[choice["index"]] += choice["text"]
    drawn = [until_end(reference.greedy(prompt, 3)) for prompt in body["prompt"]]
    assert shown == [text + reference.tokenizer.decode(ids) for text, ids in zip(texts, drawn, strict=True)]


def test_nothing_is_drawn_with_max_tokens_0(server, reference):
    text = "The capital of France is"
    reply = complete(server, prompt=text, echo=True, logprobs=0, max_tokens=0)
    (choice,) = reply["choices"]
    tokens = reference.tokenizer.encode(text)
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert reply["usage"]["completion_tokens"] == 0 and choice["logprobs"]["top_logprobs"] is None
    lines = expected(reference, tokens)
    wanted = [float(line[token]) for line, token in zip(lines, tokens[1:], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(p, abs=CLOSE) for p in wanted)]


def test_token_ids_of_a_completion_and_a_chat(server, reference):
    prompt = "User: What is the capital of France?\n\nAssistant:"
    tokens = reference.tokenizer.encode(prompt)
    drawn = until_end(reference.greedy(tokens, 20))
    (choice,) = complete(server, prompt=prompt, temperature=0, max_tokens=20, return_token_ids=True)[
        "choices"
    ]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (tokens, drawn)

    client = OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    ask = {
        "model": "rwkv7",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "presence_penalty": 0,
        "max_tokens": 30,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**ask)
    shown = httpx.post(server.url + "/tokenize", json={"messages": ask["messages"]}, timeout=60).json()[
        "tokens"
    ]
    assert whole.prompt_token_ids == shown
    assert whole.choices[0].token_ids == until_end(reference.greedy(shown, 30))
    chunks = list(client.chat.completions.create(stream=True, **ask))
    assert chunks[0].prompt_token_ids == shown
    assert [i for c in chunks for i in getattr(c.choices[0], "token_ids", [])] == whole.choices[0].token_ids
    plain = client.chat.completions.create(**ask | {"extra_body": {}})
    assert not hasattr(plain, "prompt_token_ids") and not hasattr(plain.choices[0], "token_ids")


def test_the_vocabulary_is_that_of_the_model(server, reference):
    text = "Hello 世界🦄\n"
    tokens = reference.tokenizer.encode(text)
    reply = httpx.post(
        server.url + "/tokenize", json={"prompt": text, "return_token_strs": True}, timeout=60
    ).json()
    assert (reply["tokens"], reply["count"]) == (tokens, len(tokens)) and len(reply["token_strs"]) == len(
        tokens
    )
    assert httpx.post(server.url + "/detokenize", json={"tokens": tokens}, timeout=60).json() == {
        "prompt": text
    }
    count = httpx.post(server.url + "/v1/tokens/count", json={"contents": [text, text]}, timeout=60)
    assert count.json() == {"tokens": 2 * len(tokens)}


def test_the_end_of_text_is_found_by_its_name(server):
    info = httpx.get(server.url + "/tokenizer_info", timeout=60).json()
    for name in ("bos_token", "eos_token"):
        found = httpx.post(
            server.url + "/tokenize", json={"prompt": info[name], "add_special_tokens": False}, timeout=60
        )
        assert found.json()["tokens"] == [info[name + "_id"]] == [0]
