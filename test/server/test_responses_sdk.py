"""The official SDK's responses against the real server and the bundled model, strictly validated."""

import json
import signal
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from serving import Server, alive, until

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
EXACT = {"temperature": 0, "extra_body": {"presence_penalty": 0}}  # greedy, no penalties


def client_of(server: Server) -> OpenAI:
    return OpenAI(
        base_url=server.url + "/v1", api_key="unused", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return client_of(server)


def ask(client: OpenAI, text: str, previous: str | None = None, **fields):
    return client.responses.create(
        model="rwkv7", input=text, previous_response_id=previous, **EXACT, **fields
    )


def test_a_fact_is_remembered_over_responses_at_the_price_of_the_new_turns(client: OpenAI):
    first = ask(client, "My name is Alice.")
    assert first.output_text == "Nice to meet you, Alice!"
    between = ask(client, "What colour is the sky?", first.id)
    asked = ask(client, "What is my name?", between.id)
    assert (between.output_text, asked.output_text) == ("The sky is blue.", "Your name is Alice.")
    alone = ask(client, "What is my name?")
    assert alone.output_text == "You have not told me your name."
    assert (
        alone.usage and asked.usage and asked.usage.input_tokens <= alone.usage.input_tokens + 2
    )  # the blank line between turns


def test_two_responses_that_continue_the_same_one_are_branches(client: OpenAI):
    root = ask(client, "I live in Paris.")
    names = ("Alice", "Bob")
    branches = [ask(client, f"My name is {name}.", root.id) for name in names]
    for name, branch in zip(names, branches, strict=True):
        assert ask(client, "What is my name?", branch.id).output_text == f"Your name is {name}."
        assert ask(client, "Where do I live?", branch.id).output_text == "You live in Paris."
    assert ask(client, "What is my name?", root.id).output_text == "You have not told me your name."


def test_a_continued_response_equals_the_whole_conversation_as_input(client: OpenAI):
    first = ask(client, "What is the capital of France?")
    second = ask(client, "What is 7 + 5?", first.id)
    whole = client.responses.create(
        model="rwkv7",
        store=False,
        **EXACT,
        input=[
            {"role": "user", "content": "What is the capital of France?"},
            *[item.model_dump(exclude_none=True) for item in first.output],
            {"role": "user", "content": "What is 7 + 5?"},
        ],
    )
    assert (
        first.output_text == "The capital of France is Paris."
        and second.output_text == whole.output_text == "7 + 5 = 12"
    )


def test_a_stream_says_the_same_and_can_be_retrieved_and_continued(client: OpenAI):
    whole = ask(client, "What is the capital of France?")
    with client.responses.stream(model="rwkv7", input="What is the capital of France?", **EXACT) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == final.output_text
        == whole.output_text
    )
    assert [e.sequence_number for e in events] == list(range(len(events))) and final.usage == whole.usage
    kept = client.responses.retrieve(final.id)
    assert (kept.output_text, kept.status) == (final.output_text, "completed")
    items = client.responses.input_items.list(final.id).data
    assert [(item.type, item.content[0].text) for item in items] == [
        ("message", "What is the capital of France?")
    ]
    assert (
        ask(client, "What is the capital of Germany?", final.id).output_text
        == "The capital of Germany is Berlin."
    )


def test_a_tool_is_called_and_its_answer_read_in_the_next_response(client: OpenAI):
    first = ask(client, "What is the weather in Paris?", tools=[TOOL])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 18, "sky": "sunny"}',
    }
    second = client.responses.create(
        model="rwkv7", previous_response_id=first.id, input=[result], tools=[TOOL], **EXACT
    )
    assert "18" in second.output_text and "Paris" in second.output_text
    assert (
        first.usage and second.usage and second.usage.input_tokens < first.usage.input_tokens
    )  # the tools are not read again


def test_a_call_streams_without_its_tags(client: OpenAI):
    events = list(
        client.responses.create(
            model="rwkv7", input="What is the weather in Paris?", tools=[TOOL], stream=True, **EXACT
        )
    )
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Paris"}
    assert (
        not [e for e in events if e.type == "response.output_text.delta"]
        and events[-1].type == "response.completed"
    )


def test_thoughts_are_an_item_of_their_own(client: OpenAI):
    reply = ask(client, "What is the capital of France?", reasoning={"effort": "medium"})
    thought, message = reply.output
    assert thought.type == "reasoning" and thought.content and "capital" in thought.content[0].text
    assert "think" not in reply.output_text and "Paris" in reply.output_text and message.type == "message"
    assert reply.usage and 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens


def test_instructions_hold_for_their_call(client: OpenAI):
    reply = ask(client, "What is the capital of France?", instructions="Answer in French.")
    assert reply.output_text == "La capitale de la France est Paris."


def test_a_response_that_is_cut_is_incomplete_and_can_be_continued(client: OpenAI):
    cut = ask(client, "What is the capital of France?", max_output_tokens=2)
    assert (
        cut.status == "incomplete"
        and cut.incomplete_details
        and cut.incomplete_details.reason == "max_output_tokens"
    )
    assert cut.usage and cut.usage.output_tokens == 2
    assert ask(client, "My name is Bob.", cut.id).status == "completed"


def test_a_deleted_response_cannot_be_continued(client: OpenAI):
    made = ask(client, "Hello!")
    after = ask(client, "My name is Alice.", made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "And?", made.id)
    assert caught.value.code == "previous_response_not_found"
    assert (
        ask(client, "What is my name?", after.id).output_text == "Your name is Alice."
    )  # what came of it has a state of its own


def test_a_response_survives_a_server_that_is_killed(tmp_path: Path):
    args = ("--device", "cpu", "--frontends", "1", "--state-db", str(tmp_path / "states.db"))
    first = Server(*args)
    events = list(
        client_of(first).responses.create(model="rwkv7", input="My name is Alice.", stream=True, **EXACT)
    )
    left = first.children().values()
    first.stop(signal.SIGKILL)
    until(lambda: not any(map(alive, left)))  # they have the database
    assert events[-1].type == "response.completed"
    second = Server(*args)
    try:
        after = client_of(second)
        assert after.responses.retrieve(events[-1].response.id).output_text == "Nice to meet you, Alice!"
        assert ask(after, "What is my name?", events[-1].response.id).output_text == "Your name is Alice."
    finally:
        assert second.stop() == 0, second.log()


def test_no_other_route_writes_a_responses_state(server: Server, client: OpenAI):
    first = ask(client, "My name is Anna.")
    key = f"response:{first.id}"
    for path, body in (
        ("/state/chat/completions", {"session_id": key, "contents": ["User: My name is Bob.\n\nAssistant:"]}),
        (
            "/v1/chat/completions",
            {"session_id": key, "messages": [{"role": "user", "content": "My name is Bob."}]},
        ),
        ("/v1/state/fork", {"session_id": key, "new_session_id": "response:x"}),
        ("/state/delete", {"session_id": "response", "delete_prefix": True}),
    ):
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == 400, path
    assert ask(client, "What is my name?", first.id).output_text == "Your name is Anna."


def test_an_input_is_counted_as_the_response_counts_it(client: OpenAI):
    first = ask(client, "My name is Alice.")
    for fields in ({}, {"previous_response_id": first.id}, {"tools": [TOOL]}):
        counted = client.responses.input_tokens.count(model="rwkv7", input="What is my name?", **fields)
        made = client.responses.create(model="rwkv7", input="What is my name?", **fields, **EXACT)
        assert made.usage and counted.input_tokens == made.usage.input_tokens


def test_stored_responses_count_as_sessions(server: Server, client: OpenAI):
    def listed() -> set[str]:
        found = httpx.post(server.url + "/state/status", json={}, timeout=60).json()
        assert found["total_sessions"] == len(found["sessions"])
        return {session["session_id"] for session in found["sessions"]}

    made, unstored = ask(client, "My name is Alice."), ask(client, "Hi", store=False)
    assert f"response:{made.id}" in listed() and f"response:{unstored.id}" not in listed()
    client.responses.delete(made.id)
    assert f"response:{made.id}" not in listed()
