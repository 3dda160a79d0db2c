"""Hints are taken with any value that their protocols know; logprobs of responses, and allowed tools."""

import pytest
from responses_calls import MODEL, pieces, streamed, whole
from responses_calls import TOOL as LOOK
from responses_calls import prepare as respond

from routes.anthropic import messages
from routes.http.errors import ApiError
from routes.openai import chat as openai_chat
from routes.openai import completions
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, RowDelta, TokenLogprob

HI = [{"role": "user", "content": "Hi"}]
NAMES = ["get_weather", "get_time", "get_news"]
CHAT_TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
TOOLS = [{"type": "function", "name": name} for name in NAMES]


def chat(**fields):
    return openai_chat.prepare({"messages": HI, **fields}, MODEL)


def prompt_of(prepared):
    (prompt,) = prepared.request.prompts
    return prompt


@pytest.mark.parametrize(
    "fields",
    [
        *({"text": {"verbosity": each}} for each in ("low", "medium", "high")),
        *({"reasoning": {"summary": each}} for each in ("auto", "concise", "detailed")),
        {"reasoning": {"generate_summary": "detailed"}},
        {"include": ["web_search_call.action.sources", "reasoning.encrypted_content"]},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}},
        {"service_tier": "priority", "safety_identifier": "u", "user": "u"},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"store": True, "top_logprobs": 0},
    ],
)
def test_hints_change_nothing_of_a_response(fields):
    made = respond(**fields)
    assert prompt_of(made) == prompt_of(respond()) and made.request.top_logprobs is None
    assert made.request.sampling == respond().request.sampling and not made.reply.ignored
    whole(made, pieces("Hello", 2))  # which validates the reply


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}},
        {
            "service_tier": "flex",
            "verbosity": "low",
            "safety_identifier": "u",
            "prediction": {"type": "content", "content": "Hello"},
        },
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
        {"include_reasoning": True, "reasoning": {"exclude": False}},
        {"reasoning": {"exclude": None, "effort": None, "enabled": None, "max_tokens": None}},
    ],
)
def test_hints_change_nothing_of_a_chat(fields):
    made = chat(**fields)
    assert prompt_of(made) == prompt_of(chat()) and made.request.sampling == chat().request.sampling
    assert completions.prepare({"prompt": "Hi", "store": True, "service_tier": "flex"}, MODEL)


@pytest.mark.parametrize(
    "fields",
    [
        {"speed": "fast", "inference_geo": "us", "service_tier": "standard_only"},
        {"metadata": {"user_id": "u"}, "diagnostics": {"previous_message_id": None}},
        {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True, "eager_input_streaming": True}]},
    ],
)
def test_hints_change_nothing_of_a_message(fields):
    body = {"messages": HI, "max_tokens": 9}
    plain = body | ({"tools": [{"name": "f", "input_schema": {}}]} if "tools" in fields else {})
    made = messages.prepare(body | fields, MODEL, FrontendConfig())
    assert made.request.prompts == messages.prepare(plain, MODEL, FrontendConfig()).request.prompts


def test_a_search_for_deferred_tools_says_what_it_has_found():
    """Claude Code has the search as a tool of its own, whose result is a list of references."""
    found = [{"type": "tool_reference", "tool_name": name} for name in NAMES[:2]]
    turns = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]},
    ]
    tools = [{"name": name, "input_schema": {}, "defer_loading": name != "find"} for name in ["find", *NAMES]]
    made = messages.prepare({"messages": turns, "max_tokens": 9, "tools": tools}, MODEL, FrontendConfig())
    assert "\n\nTool: get_weather\nget_time\n\n" in prompt_of(made)
    with pytest.raises(ApiError, match="reads text only"):
        turns[2]["content"][0]["content"] = [{"type": "image", "source": {}}]
        messages.prepare({"messages": turns, "max_tokens": 9}, MODEL, FrontendConfig())


@pytest.mark.parametrize(
    ("reasoning", "thinks"),
    [
        ({"effort": "high"}, True),
        ({"effort": "max", "max_tokens": 9}, True),
        ({"effort": "minimal"}, False),
        ({"max_tokens": 2000}, True),
        ({"max_tokens": 0}, False),
        ({"enabled": True}, True),
        ({"enabled": False, "effort": "high"}, False),
        ({}, False),
    ],
)
def test_the_thought_that_openrouters_clients_ask_for(reasoning, thinks):
    assert prompt_of(chat(reasoning=reasoning)) == prompt_of(chat(enable_think=thinks))


def test_a_thought_that_contradicts_another_field_is_refused():
    with pytest.raises(ApiError, match=r"^reasoning_effort: this contradicts reasoning"):
        chat(reasoning={"effort": "high"}, reasoning_effort="none")
    with pytest.raises(ApiError, match=r"^reasoning\.effort: "):
        chat(reasoning={"effort": "huge"})


@pytest.mark.parametrize("fields", [{"reasoning": {"effort": "low", "exclude": True}},
                                    {"include_reasoning": False, "enable_think": True}])  # fmt: skip
def test_a_thought_may_be_left_out_of_the_reply(fields):
    deltas = [RowDelta(0, ">Hm.</think>", 2), RowDelta(0, "Hello", 1, "stop")]
    made = chat(**fields)
    job = Job(made.request, lambda _: None)
    job.acceptance = Accepted("", [5], [0])
    (choice,) = made.reply.whole(job, deltas)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    reply = chat(**fields).reply
    parts = [part for each in deltas for event in reply.events([each]) for part in event["choices"]]
    assert [part["delta"] for part in parts] == [{"content": "Hello"}, {}]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_calls_may_be_allowed_of_some_tools_only(mode):
    allowed = CHAT_TOOLS[2:0:-1]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    one, other = chat(tools=CHAT_TOOLS, tool_choice=choice), chat(tools=CHAT_TOOLS[1:], tool_choice=mode)
    assert prompt_of(one) == prompt_of(other)
    choice = {"type": "allowed_tools", "mode": mode, "tools": TOOLS[2:0:-1]}
    made, expected = respond(tools=TOOLS, tool_choice=choice), respond(tools=TOOLS[1:], tool_choice=mode)
    assert prompt_of(made) == prompt_of(expected) and "get_weather" not in prompt_of(made)
    response = whole(made, pieces('<tool_call>{"name": "get_time", "arguments": {}}</tool_call>', 5))
    assert response.output[-1].name == "get_time" and response.tool_choice.mode == mode
    assert [tool.name for tool in response.tools] == NAMES, "those that are offered stay listed"


@pytest.mark.parametrize(
    ("allowed", "place"),
    [
        (None, ""),
        ({"mode": "any", "tools": CHAT_TOOLS}, ".mode"),
        ({"mode": "auto"}, ".tools"),
        ({"mode": "auto", "tools": []}, ".tools"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]}, ".tools[0]"),
        ({"mode": "auto", "tools": [CHAT_TOOLS[0], {"type": "web_search"}]}, ".tools[1]"),
    ],
)
def test_what_may_not_be_allowed_is_named(allowed, place):
    with pytest.raises(ApiError) as refused:
        chat(tools=CHAT_TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (refused.value.status, refused.value.param) == (400, "tool_choice.allowed_tools" + place)


def drawn(*tokens: str) -> list[TokenLogprob]:
    return [TokenLogprob(each.encode(), -0.5, [(b"a", -0.25), (each.encode(), -0.5)]) for each in tokens]


def tokens_of(logprobs) -> list[str]:
    return [each["token"] for each in logprobs]


WANTED = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(("fields", "asked"), [({"top_logprobs": 3}, 3), (WANTED, 2),
                         ({"include": WANTED["include"]}, 0), ({"top_logprobs": 0}, None)])  # fmt: skip
def test_logprobs_of_a_response_are_asked_for_in_two_ways(fields, asked):
    assert respond(**fields).request.top_logprobs == asked


def test_a_message_has_the_logprobs_of_its_text():
    deltas = [
        RowDelta(0, "Hel", 1, logprobs=drawn("Hel")),
        RowDelta(0, "lo", 1, logprobs=drawn("lo")),
        RowDelta(0, "", 1, "stop", logprobs=drawn("\0")),
    ]
    response = whole(respond(**WANTED), deltas)
    (part,) = response.output[0].content
    assert [each.token for each in part.logprobs] == ["Hel", "lo"] and response.top_logprobs == 2
    assert [(top.token, top.logprob) for top in part.logprobs[1].top_logprobs] == [("a", -0.25), ("lo", -0.5)]
    events = streamed(respond(stream=True, **WANTED), deltas)
    said = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    (done,) = (event["logprobs"] for event in events if event["type"] == "response.output_text.done")
    assert [tokens_of(each) for each in said] == [["Hel"], ["lo"]] and tokens_of(done) == ["Hel", "lo"]


@pytest.mark.parametrize("together", [False, True])
def test_thoughts_and_calls_have_no_logprobs(together):
    texts = [">Hm", ".</think>", "\n", "So", " it"]
    deltas = [RowDelta(0, text, 1, logprobs=drawn(text)) for text in texts]
    if together:
        deltas = [RowDelta(0, "".join(texts), 5, logprobs=drawn(*texts))]
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    deltas += [RowDelta(0, call, 1, logprobs=drawn(call)), RowDelta(0, "", 1, "stop")]
    made = respond(tools=[LOOK | {"strict": False}], reasoning={"effort": "high"}, **WANTED)
    response = whole(made, deltas)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    (part,) = response.output[1].content
    tokens = [each.token for each in part.logprobs]
    assert (part.text, tokens) == ("So it", ["So", " it"])
