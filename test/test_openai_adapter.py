"""The OpenAI bodies without a server: users run this file by its name, so it stays here."""

import pytest

from routes.http.errors import ApiError
from routes.openai import chat as openai_chat
from routes.openai import completions as openai_completions
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import RowDelta, Sampling

HI = {"role": "user", "content": "Hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
MODEL = "rwkv7-test"
NO_THINK = "Assistant: <think>\n</think>\n"


def chat(**fields):
    return openai_chat.prepare({"model": "any", "messages": [HI], **fields}, MODEL)


def complete(**fields):
    return openai_completions.prepare({"model": "any", "prompt": "Once", **fields}, MODEL)


def test_chat_defaults():
    request, streams, _ = chat()
    assert (request.prompts, request.max_tokens, request.n, streams) == (
        ["User: Hi\n\n" + NO_THINK],
        4096,
        1,
        False,
    )
    assert (request.stop_ids, request.stop_strings) == ([0], ["\n\nUser:", "\nUser:"])
    assert request.sampling == Sampling(
        temperature=1, top_k=20, top_p=0.6, alpha_presence=1, alpha_frequency=0.1, alpha_decay=0.996
    )
    assert (request.flush_tokens, request.top_logprobs) == (0, None)


def test_completion_defaults():
    request, streams, _ = complete()
    assert (request.prompts, request.max_tokens, request.n, streams) == (["Once"], 16, 1, False)
    assert (request.stop_ids, request.stop_strings) == ([0], [])
    assert request.sampling == Sampling(
        temperature=1, top_k=0, top_p=1, alpha_presence=0, alpha_frequency=0, alpha_decay=0.996
    )


@pytest.mark.parametrize("prepare", [chat, complete])
def test_every_sampling_field_reaches_the_engine(prepare):
    fields = {
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": "7",
        "alpha_presence": 0.3,
        "alpha_frequency": 0.2,
        "alpha_decay": 0.9,
        "presence_penalty": 1,
        "frequency_penalty": -2,
        "logit_bias": {"11": -100, "65529": 1.5},
        "seed": 42,
    }
    assert prepare(**fields)[0].sampling == Sampling(
        0.5, 7, 0.4, 0.3, 0.2, 0.9, 1.0, -2.0, {11: -100.0, 65529: 1.5}, seed=42
    )
    request, streams, _ = prepare(stream=True, chunk_size=8, n=3, max_tokens=9)
    assert (streams, request.flush_tokens, request.n, request.max_tokens) == (True, 8, 3, 9)
    assert prepare(stream=True)[0].flush_tokens == prepare(stream=True, chunk_size=-1)[0].flush_tokens == 1


def test_openai_penalties_take_the_place_of_the_alphas():
    sampling = chat(presence_penalty=0.5)[0].sampling
    assert (sampling.alpha_presence, sampling.alpha_frequency, sampling.presence_penalty) == (0, 0, 0.5)
    sampling = chat(frequency_penalty=0, alpha_presence=2)[0].sampling
    assert (sampling.alpha_presence, sampling.alpha_frequency) == (2, 0)


def test_stops():
    def stops(**fields):
        request = chat(**fields)[0]
        late = request.late_stops.strings if request.late_stops else []
        return request.stop_ids, request.stop_strings, late

    assert stops(stop="END") == ([0], ["\n\nUser:", "\nUser:"], ["END"])
    assert stops(stop_tokens=[261, "Q:"]) == ([261], [], ["Q:"])
    assert stops(stop_tokens=[261], stop=["a", "b"]) == ([261], [], ["a", "b"])
    assert stops(stop_tokens=[]) == ([], [], [])
    assert stops(ignore_eos=True) == ([], ["\n\nUser:", "\nUser:"], [])
    assert stops(ignore_eos=True, stop_tokens=[0, 261]) == ([261], [], [])
    assert complete(ignore_eos=True)[0].stop_ids == []


def test_negative_seed_is_a_seed():
    seed = chat(seed=-5)[0].sampling.seed
    assert seed >= 0 and seed == chat(seed=-5)[0].sampling.seed != chat(seed=5)[0].sampling.seed


def test_null_means_not_given():
    fields = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "stream",
        "seed",
        "logit_bias",
        "logprobs",
        "stream_options",
        "presence_penalty",
        "tools",
        "tool_choice",
        "response_format",
        "user",
        "store",
        "session_id",
    )
    got, plain = chat(**dict.fromkeys(fields))[0], chat()[0]
    for name in plain.__struct_fields__:
        assert name == "id" or getattr(got, name) == getattr(plain, name)


def test_max_completion_tokens():
    assert (
        chat(max_completion_tokens=7)[0].max_tokens
        == chat(max_completion_tokens=7, max_tokens=7)[0].max_tokens
        == 7
    )
    assert chat(max_tokens=0)[0].max_tokens == 0


def test_messages_of_every_kind():
    request = chat(
        system="One.",
        messages=[
            {"role": "developer", "content": "Two."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is "}, {"type": "input_text", "text": "it"}, "?"],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "now", "arguments": '{\n\n"zone":"UTC"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "12:00"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": None},
        ],
        contents=["Please."],
    )[0]
    assert request.prompts == [
        "System: One.\nTwo.\n\nUser: What is it?\n\nAssistant: "
        '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>\n\n'
        "Tool: 12:00\n\nAssistant: No.\n\nUser: Please.\n\n" + NO_THINK
    ]


def test_thinking():
    for fields in (
        {"enable_think": True},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "high", "enable_think": True},
    ):
        assert chat(**fields)[0].prompts == ["User: Hi\n\nAssistant: <think"]
    for fields in ({"enable_think": False}, {"reasoning_effort": "none"}, {"reasoning_effort": "minimal"}):
        assert chat(**fields)[0].prompts == ["User: Hi\n\n" + NO_THINK]


def test_last_assistant_message_is_continued():
    request, _, reply = chat(messages=[HI, {"role": "assistant", "content": "Good"}], enable_think=True)
    assert request.prompts == ["User: Hi\n\nAssistant: Good"]
    message = reply.whole(Job(request, lambda _: None), [RowDelta(0, " day", 1, "stop")])["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": " day"}


def test_tool_choice_shapes_the_prompt():
    assert chat(tools=[TOOL])[0].prompts[0].endswith("User: Hi\n\n" + NO_THINK)
    assert "Tool: get_weather\n" in chat(tools=[TOOL])[0].prompts[0]
    for fields in (
        {"tool_choice": "none"},
        {"rwkv_tool_compat_mode": False},
        {"rwkv_tool_compat_mode": "false"},
    ):
        assert chat(tools=[TOOL], **fields)[0].prompts == ["User: Hi\n\n" + NO_THINK]
    required = chat(tools=[TOOL], tool_choice="required")[0].prompts[0]
    assert "You must call a tool." in required and required.endswith(NO_THINK + '<tool_call>{"name": "')
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}})[
        0
    ].prompts[0]
    assert named.endswith(NO_THINK + '<tool_call>{"name": "get_weather", "arguments":')
    assert (
        chat(tools=[TOOL], tool_choice="required", enable_think=True)[0]
        .prompts[0]
        .endswith("Assistant: <think")
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 65529], [[1, 65529]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [[0]]),
        (["a", ""], ["a", [0]]),
        (None, [[0]]),
    ],
)
def test_prompt_forms(prompt, prompts):
    assert complete(prompt=prompt)[0].prompts == prompts


def test_suffix_makes_a_fill_in_the_middle_prompt():
    assert complete(prompt=["a", "b"], suffix="z")[0].prompts == [
        "✿prefix✿✿suffix✿z✿middle✿a",
        "✿prefix✿✿suffix✿z✿middle✿b",
    ]


# field -> values of it that are refused with a sentence that names it
BAD_EITHER = {
    "max_tokens": [-1, True, 2**31, 1.5],
    "temperature": [2.1, -0.1, "hot", float("nan")],
    "top_p": [1.01, -1],
    "top_k": [-2, 2.5],
    "alpha_decay": [1.1],
    "alpha_presence": [float("inf")],
    "presence_penalty": [3],
    "frequency_penalty": [-2.5],
    "logit_bias": [
        {"x": 1},
        {"65536": 1},
        {"1": 101},
        {"-1": 1},
        {"²": 1},
        {"1": True},
        {"1": float("nan")},
        [],
    ],
    "seed": [2**63, 1.5],
    "n": [0, 4097, True],
    "stop": [["a"] * 17, "", [""], [1], 5],
    "stop_tokens": [[-1], [65536], [True], [""], 0, [1] * 65],
    "stream": ["maybe"],
    "stream_options": [{"include_usage": True}],
    "chunk_size": ["x"],
    "ignore_eos": [3],
    "use_prefix_cache": ["perhaps"],
    "return_token_ids": ["perhaps"],
}
BAD_CHAT = {
    "messages": [[], "Hi", None, [{"role": "user", "content": " "}]],
    "contents": [["a", "b"]],
    "system": [5],
    "max_completion_tokens": [-1],
    "top_logprobs": [2],
    "logprobs": [5],
    "tools": [{}, [TOOL] * 129],
    "tool_choice": ["any", "required", ["auto"], {"type": "x"}],
    "rwkv_tool_compat_mode": ["yes"],
    "tool_call_parser": ["prefix"],
    "enable_tool_calls": ["x"],
    "parallel_tool_calls": ["x"],
    "response_format": [{"type": "xml"}, "text"],
    "reasoning_effort": ["huge"],
    "audio": [{"voice": "x"}],
    "modalities": [["text", "audio"]],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "web_search_options": [{"search_context_size": "low"}],
    "session_id": [5, "a\nb", "\x7f", "x" * 257],
}
BAD_COMPLETION = {
    "prompt": [[], [[]], ["a", 1], [65530], [-1], [True], 5, {"a": 1}, [[1], "a"]],
    "logprobs": [6, True],
    "best_of": [2],
    "suffix": [1],
    "session_id": ["s"],
}
# more than one field, or a place inside of one
BAD_PLACES_CHAT = [
    ({"stream": True, "stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"contents": [1]}, "contents[0]"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"enable_think": True, "reasoning_effort": "none"}, "reasoning_effort"),
    ({"tools": [{}]}, "tools[0].type"),
    (
        {"tools": [{"type": "custom"}], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice",
    ),
    ({"tools": [5]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
        "tools[0].function.description",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice.function.name",
    ),
]
BAD_PLACES_COMPLETION = [
    ({"prompt": ["a"] * 4097}, "n"),
    ({"prompt": ["a"] * 33, "n": 128}, "n"),
    ({"echo": True, "logprobs": 0, "suffix": "b"}, "echo"),
    ({"suffix": "b", "prompt": [[1]]}, "suffix"),
]
BAD_MESSAGES = [
    ("Hi", ""),
    ({"content": "Hi"}, ".role"),
    ({"role": "robot", "content": ""}, ".role"),
    ({"role": ["user"], "content": ""}, ".role"),
    ({"role": "user"}, ".content"),
    ({"role": "user", "content": 5}, ".content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ".content[0].type"),
    ({"role": "user", "content": ["a", {"type": "input_audio"}]}, ".content[1].type"),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text"),
    ({"role": "user", "content": [{"type": []}]}, ".content[0]"),
    ({"role": "assistant", "tool_calls": "x"}, ".tool_calls"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        ".tool_calls[0].function.name",
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        ".tool_calls[0].function.arguments",
    ),
    ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call"),
    ({"role": "assistant", "audio": {"id": "x"}}, ".audio"),
    ({"role": "tool", "content": "x", "tool_call_id": 3}, ".tool_call_id"),
]


def single(*tables):
    return [
        ({field: value}, field) for table in tables for field, values in table.items() for value in values
    ]


@pytest.mark.parametrize(
    ("prepare", "fields", "param"),
    [
        *((chat, *case) for case in single(BAD_EITHER, BAD_CHAT) + BAD_PLACES_CHAT),
        *((chat, {"messages": [HI, message]}, "messages[1]" + place) for message, place in BAD_MESSAGES),
        *((complete, *case) for case in single(BAD_EITHER, BAD_COMPLETION) + BAD_PLACES_COMPLETION),
    ],
)
def test_bad_input_is_refused_with_a_sentence_that_names_the_field(prepare, fields, param):
    with pytest.raises(ApiError) as raised:
        prepare(**fields)
    error = raised.value
    assert (error.status, error.param) == (400, param)
    assert param in error.message and error.message.endswith(".") and "\n" not in error.message


def test_prompt_is_needed():
    with pytest.raises(ApiError, match="prompt: this field is required"):
        openai_completions.prepare({"model": "x"}, MODEL)
    with pytest.raises(ApiError, match="Empty prompt"):
        openai_chat.prepare({"model": "x"}, MODEL)


def test_labels_and_hints_are_accepted():
    chat(
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        parallel_tool_calls=False,
        use_prefix_cache=False,
        modalities=["text"],
        response_format={"type": "text"},
        tool_call_parser="tag",
        tool_choice="auto",
        unheard_of=[1],
        pad_zero=True,
        stop_tokens=[0, 261, 24281],
    )
    complete(best_of=2, n=2, user="u", echo=False, suffix="", stream_options=None)
