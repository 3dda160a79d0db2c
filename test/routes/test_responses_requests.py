"""Responses without a server: what a request becomes for the engine, and what is refused."""

import json
from functools import partial

import pytest
from openai.types.responses import ResponseItemList
from responses_calls import ANSWER, CALL, PREVIOUS, TOOL, prepare, prompt_of

from routes.http.errors import ApiError
from routes.responses.prepare import state_key
from rwkv_batch.wire.protocol import Sampling, SessionTurn


def test_a_first_response_is_a_turn_that_keeps_its_state():
    prepared = prepare()
    request = prepared.request
    assert request.prompts == ["User: Hi\n\n" + ANSWER]
    assert (request.max_tokens, request.n, request.flush_tokens, prepared.stream) == (4096, 1, 1, False)
    assert (request.stop_ids, request.stop_strings) == ([0], ["\n\nUser:", "\nUser:"])
    assert request.sampling == Sampling(
        temperature=1, top_k=20, top_p=0.6, alpha_presence=1, alpha_frequency=0.1, alpha_decay=0.996
    )
    response_id = prepared.reply.response["id"]
    assert (
        request.turn == SessionTurn(source=None, target=f"response:{response_id}", separator="\n\n")
        and state_key(response_id) == request.turn.target
    )
    assert response_id.startswith("resp_") and len(response_id) == 5 + 32


def test_a_continued_response_sends_its_new_turns_only_and_demands_the_state():
    prepared = prepare(previous_response_id=PREVIOUS, input="And now?")
    assert prepared.request.prompts == ["User: And now?\n\n" + ANSWER]
    turn = prepared.request.turn
    assert (turn.source, turn.required, turn.separator) == (f"response:{PREVIOUS}", True, "\n\n")
    assert (
        turn.target == state_key(prepared.reply.response["id"]) == f"response:{prepared.reply.response['id']}"
    )
    other = prepare(previous_response_id=PREVIOUS, input="And now?")
    assert other.request.turn.source == turn.source and other.request.turn.target != turn.target  # a branch


def test_what_is_not_stored_has_no_target():
    assert prepare(store=False).request.turn is None
    turn = prepare(store=False, previous_response_id=PREVIOUS).request.turn
    assert (turn.source, turn.target, turn.required) == (f"response:{PREVIOUS}", None, True)


def test_fields_reach_the_engine():
    request = prepare(
        max_output_tokens=7, temperature=0, top_p=0.5, seed=3, stop="x", stream=True, use_prefix_cache=False
    ).request
    assert (request.max_tokens, request.flush_tokens, request.prefix_cache, request.late_stops.strings) == (
        7,
        1,
        False,
        ["x"],
    )
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0, 0.5, 3)


def test_items_become_turns():
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather "}, {"type": "input_text", "text": "there?"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "secret"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": '{"city":"Paris"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    assert prompt_of(input=items) == (
        f"System: Be brief.\n\nUser: Weather there?\n\nAssistant: Let me see.\n{CALL}\n\nTool: "
        f"sunny\n\n{ANSWER}"
    )
    listed = prepare(input=items).document().input
    ResponseItemList.model_validate_json(
        json.dumps(
            {
                "object": "list",
                "data": listed,
                "has_more": False,
                "first_id": listed[0]["id"],
                "last_id": listed[-1]["id"],
            }
        ),
        strict=True,
    )
    assert [item["type"] for item in listed] == [item.get("type", "message") for item in items]
    assert listed[3]["id"] == "msg_1" and [part["text"] for part in listed[1]["content"]] == [
        "Weather ",
        "there?",
    ]


def test_a_call_alone_is_the_assistants_turn():
    items = [
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    assert prompt_of(input=items) == f"Assistant: {CALL}\n\nTool: rain\n\n{ANSWER}"


def test_an_assistant_message_at_the_end_is_continued():
    assert prompt_of(
        input=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}],
        reasoning={"effort": "high"},
    ) == ("User: Hi\n\nAssistant: Hel")


def test_thinking_follows_the_effort():
    assert prompt_of(reasoning={"effort": "medium"}).endswith("Assistant: <think")
    for effort in (None, "none", "minimal"):
        assert prompt_of(reasoning={"effort": effort}).endswith(ANSWER)


def test_a_required_call_is_begun():
    assert prompt_of(tools=[TOOL], tool_choice="required").endswith('<tool_call>{"name": "')
    assert prompt_of(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}).endswith(
        '"get_weather", "arguments":'
    )
    assert "get_weather" not in prompt_of(tools=[TOOL], tool_choice="none")


def test_instructions_and_tools_that_the_state_has_read_last_are_not_read_again():
    fields = {"instructions": "Be kind.", "tools": [TOOL]}
    first = prepare(**fields)
    assert (
        first.request.prompts[0].startswith("System: Be kind.\nYou can call")
        and "get_weather" in first.request.prompts[0]
    )
    seen = first.document()
    again = partial(prepare, previous_response_id=PREVIOUS)
    same = again(seen, **fields)
    assert same.request.prompts == ["User: Hi\n\n" + ANSWER]
    assert same.reply.response["instructions"] == "Be kind." and same.reply.response["tools"]
    without = again(same.document())
    assert again(without.document(), **fields).request.prompts == ["User: Hi\n\n" + ANSWER]
    other = again(seen, instructions="Be terse.", tools=[TOOL])
    assert other.request.prompts == ["System: Be terse.\n\nUser: Hi\n\n" + ANSWER]
    assert (
        again(other.document(), instructions="Be kind.")
        .request.prompts[0]
        .startswith("System: Be kind.\n\nUser: Hi")
    )
    forced = again(seen, tools=[TOOL], tool_choice="required").request.prompts[0]
    assert "You must call a tool." in forced and "Be kind." not in forced


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]},
            "input[0].name",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"instructions": ["x"]}, "instructions"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"session_id": "s"}, "session_id"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"include": [5]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"verbosity": "wordy"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": [{"type": "function", "name": " "}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "crm"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "", "tools": []}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": 5}]}]},
            "tools[0].tools[0].name",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "namespace": 5}]},
            "input[0].namespace",
        ),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]},
            "tool_choice.tools",
        ),
        ({"previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        prepare(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: ") and caught.value.message.endswith(".")
