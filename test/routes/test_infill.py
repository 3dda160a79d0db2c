"""/infill and /v1/fim/completions as editors ask for them, against an engine that echoes prompts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routes.http.errors import ApiError
from routes.llama_cpp.infill import IndentedText, prepare
from routes.openai import fim
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta

ECHO = "✿prefix✿✿suffix✿\nprint(x)✿middle✿x = "
PAIR = {"input_prefix": "x = ", "input_suffix": "\nprint(x)"}
# what an editor sends beside the texts
HABITS = {
    "n_predict": 128,
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "id_slot": -1,
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "repeat_penalty": 1.0,
    "dry_multiplier": 0.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0,
    "grammar": "",
    "seed": -1,
}


def infill(**fields):
    return prepare(fields, "m")


def whole(prepared, *deltas: RowDelta) -> dict:
    return prepared.reply.whole(Job(prepared.request, lambda _: None), list(deltas))


def test_the_middle_is_filled_in(server):
    reply = server.http.post("/infill", json=PAIR | HABITS).json()
    assert reply["content"] == ECHO and reply["stop"] is True
    assert (reply["stop_type"], reply["stopping_word"]) == ("eos", "")
    assert (reply["tokens_evaluated"], reply["tokens_predicted"]) == (len(ECHO), len(ECHO))
    timings = reply["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (len(ECHO), len(ECHO))
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] >= 0
    request = server.engine.request(ECHO)
    assert (request.max_tokens, request.sampling.top_k, request.sampling.seed) == (128, 40, None)


def test_a_stream_brings_the_same_text(server):
    streamed = server.http.post("/infill", json=PAIR | HABITS | {"stream": True})
    frames = [frame for frame in streamed.text.split("\n\n") if frame.startswith("data: ")]
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert "".join(event["content"] for event in events) == ECHO
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_other_texts_and_what_the_middle_begins_with_stand_in_front():
    extra = [{"filename": "a.py", "text": "a = 1"}, {"text": "b = 2"}]
    (prompt,) = infill(**PAIR, input_extra=extra, prompt="y").request.prompts
    assert prompt == "✿prefix✿✿suffix✿\nprint(x)✿middle✿a = 1\nb = 2\nx = y"


@pytest.mark.parametrize("width", [-1, 0, 0.0])
def test_a_sampler_that_is_off_is_taken(width):
    assert infill(**PAIR, top_n_sigma=width).request.prompts


def test_a_cache_that_is_to_be_filled_generates_nothing(server):
    fields = {"input_extra": [{"text": "a"}], "n_predict": 0, "response_fields": [""]}
    assert server.http.post("/infill", json=HABITS | fields).json() == {}


def test_a_reply_has_the_fields_that_are_wanted():
    wanted = ["content", "timings/predicted_n", "timings/nothing", "content/deeper", "other"]
    reply = whole(infill(**PAIR, response_fields=wanted), RowDelta(0, "1", 1, "stop"))
    assert reply == {"content": "1", "timings/predicted_n": 1}


@pytest.mark.parametrize(
    ("last", "stop_type", "word"),
    [
        (RowDelta(0, "1", 1, "stop"), "eos", ""),
        (RowDelta(0, "1", 1, "stop", stop="\n\n"), "word", "\n\n"),
        (RowDelta(0, "1", 1, "length"), "limit", ""),
    ],
)
def test_it_says_why_the_text_ended(last, stop_type, word):
    reply = whole(infill(**PAIR, stop=["\n\n"]), last)
    assert (reply["stop_type"], reply["stopping_word"]) == (stop_type, word)


def test_a_line_that_is_indented_less_ends_the_text():
    reply = whole(infill(**PAIR, n_indent=4), RowDelta(0, "if x:\n    y\n\n\tz\n  w", 9, "stop"))
    assert reply["content"] == "if x:\n    y" and reply["stop_type"] == "limit"


def lines_of(text: str, least: int) -> str:
    """The lines that are kept of a whole text."""
    first, *others = text.split("\n")
    kept = [first]
    for number, line in enumerate(others):
        solid = line.lstrip(" \t")
        if least and solid and len(line) - len(solid) < least:
            while kept[1:] and not kept[-1].strip(" \t"):
                kept.pop()
            break
        kept.append(line)
        assert number < len(others)
    return "\n".join(kept)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text(alphabet="a \t\n", max_size=6), max_size=6), st.integers(0, 3))
def test_any_split_gives_what_the_whole_text_gives(pieces, least):
    text = IndentedText(least)
    shown = "".join(text.feed(piece) for piece in pieces) + text.finish()
    assert shown == lines_of("".join(pieces), least)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"n_predict": -3}, "n_predict"),
        ({"n_indent": -1}, "n_indent"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        ({"typical_p": 0.1}, "typical_p"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"top_n_sigma": 1.0}, "top_n_sigma"),
        ({"grammar": 5}, "grammar"),
        ({"grammar": "root ::= x", "json_schema": {}}, "json_schema"),
        ({"grammar": "root ::= x", "grammar_lazy": True}, "grammar_lazy"),
        ({"json_schema": "{"}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"n_probs": 3}, "n_probs"),
        ({"session_id": "s"}, "session_id"),
        ({"n": 2}, "n"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields, place):
    with pytest.raises(ApiError) as refused:
        infill(**fields)
    assert refused.value.status == 400 and refused.value.message.startswith(f"{place}: ")


MISTRAL = {"model": "rwkv7", "prompt": "x = ", "suffix": "\nprint(x)", "random_seed": 7, "max_tokens": 64}


def test_mistrals_clients_get_the_middle_as_a_chat(server):
    reply = server.http.post("/v1/fim/completions", json=MISTRAL).json()
    (choice,) = reply["choices"]
    assert (reply["object"], reply["usage"]["completion_tokens"]) == ("chat.completion", len(ECHO))
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": ECHO}, "stop")
    streamed = server.http.post("/v1/fim/completions", json=MISTRAL | {"stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert streamed.endswith("data: [DONE]\n\n")
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events) == ECHO
    alone = server.http.post("/v1/fim/completions", json={"prompt": "x = "}).json()
    assert alone["choices"][0]["message"]["content"] == "x = "


def test_what_mistrals_clients_ask_is_honoured_or_refused():
    asked = fim.prepare(MISTRAL | {"stop": ["\n\n"], "temperature": 0.2, "top_p": 0.5}, "m").request
    assert (asked.sampling.seed, asked.max_tokens, asked.stop_strings) == (7, 64, ["\n\n"])
    assert (asked.sampling.temperature, asked.sampling.top_p) == (0.2, 0.5)
    for fields, named in [
        ({"prompt": ""}, "prompt: "),
        ({"suffix": "x"}, "prompt: "),
        ({"prompt": "x", "min_tokens": 4}, "min_tokens: "),
        ({"prompt": "x", "random_seed": 7, "seed": 8}, "random_seed: "),
        ({"prompt": "x", "think_type": "free"}, "think_type: "),
        ({"prompt": "x", "session_id": "s"}, "session_id: "),
    ]:
        with pytest.raises(ApiError) as refused:
            fim.prepare(fields, "m")
        assert refused.value.status == 400 and refused.value.message.startswith(named)
