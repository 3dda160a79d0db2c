"""The demo model's training text has the prompts that the routes send to the engine."""

from dataclasses import replace
from random import Random

import pytest

from demo.training import tooluse
from demo.training.conversation import CHAT, TOOL_WAYS, WAYS, conversation
from demo.training.encoding import prompt_ids
from demo.training.fim import fim
from demo.training.translation import render
from routes.chat.answer import AnswerReader
from routes.native import batch
from routes.openai import chat
from routes.responses import prepare as responses
from routes.responses.schemas import ResponsesBody
from routes.translate.handlers import prepare_translation
from routes.translate.wires import IMMERSIVE
from rwkv_batch.chat.templates import Message
from rwkv_batch.config import FrontendConfig
from rwkv_batch.engine.scheduling.prompts import PromptEncoder
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest, RowDelta
from rwkv_batch.wire.supervision import EngineInfo

NAME = "rwkv7-demo"
MODEL = EngineInfo(NAME, 1, 64, 1, "float32", "cpu", 8, 65536, "0" * 16, NAME)
SYSTEM = "You are a friendly robot."
ASKED = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TURNS = [Message("user", "Hi"), Message("assistant", "Hello! How can I help you?"), Message("user", ASKED)]


def ids(request):
    """The tokens that the engine begins with."""
    encoder = PromptEncoder(Tokenizer(), 65536)
    return [encoder.encode(prompt, request.prefix_ids) for prompt in request.prompts]


def settings(way):
    return replace(FrontendConfig(), chat_template=way.template)


def fields(way):
    chosen = {"think_type": way.think_type, "chat_template_kwargs": {"rwkv_prompt_template": way.form}}
    return chosen


def as_json(messages):
    return [{"role": m.role, "content": m.text} for m in messages]


def made(way, turns=TURNS, **more):
    return conversation(Random(1), "x", turns, ANSWER, thought="I know it.", system=SYSTEM, way=way, **more)


SENT = [way for way in WAYS if way.lead and not (way.bare or way.kept or way.begun)]


@pytest.mark.parametrize("way", SENT, ids=str)
def test_a_conversation_is_what_the_chat_routes_send(way):
    messages = [{"role": "system", "content": SYSTEM}, *as_json(TURNS)]
    request = chat.prepare({"messages": messages, **fields(way)}, NAME, settings(way)).request
    example = made(way)
    assert ids(request) == [prompt_ids(example)]
    body = ResponsesBody.from_json(
        {"instructions": SYSTEM, "input": as_json(TURNS), **fields(way)}, "default"
    )
    assert ids(responses.prepare(body, NAME, None, settings(way))[0]) == [prompt_ids(example)]


@pytest.mark.parametrize("way", [way for way in WAYS if way.bare and way.lead], ids=str)
def test_a_question_of_v3_has_no_line_feed_at_its_end(way):
    turns = [Message("user", ASKED)]
    body = {"contents": [ASKED], **fields(way)}
    example = conversation(Random(1), "x", turns, ANSWER, way=way)
    assert ids(batch.v3(body, NAME, settings(way)).request) == [prompt_ids(example)]
    assert example.answer == f"\n{ANSWER}"


@pytest.mark.parametrize("way", [way for way in WAYS if way.kept and way.lead], ids=str)
def test_a_session_reads_its_requests_one_after_the_other(way):
    example, read, encoder = made(way), [], PromptEncoder(Tokenizer(), 65536)
    groups = [[{"role": "system", "content": SYSTEM}, *as_json(TURNS[:1])], as_json(TURNS[2:])]
    for messages in groups:
        body = {"messages": messages, "session_id": "s", **fields(way)}
        request = chat.prepare(body, NAME, settings(way)).request
        assert request.turn
        read += encoder.encode_turn(request, request.turn.separator if read else None)
        if len(read) < len(prompt_ids(example)):
            read += Tokenizer().encode(example.parts[1])
    assert read == prompt_ids(example)
    reader = AnswerReader(way.style.thought)
    assert (reader.feed(example.parts[1]) + reader.finish()).content == TURNS[1].text


@pytest.mark.parametrize("way", [way for way in WAYS if not way.lead and not way.kept], ids=str)
def test_without_the_leading_token_it_is_a_raw_prompt(way):
    example = made(way)
    assert ids(batch.v1({"contents": [example.prompt]}, NAME).request) == [prompt_ids(example)]


def test_an_answer_that_the_client_has_begun_is_continued():
    (way,) = (way for way in WAYS if way.begun)
    example = made(way)
    head = ANSWER.removesuffix(example.answer)
    assert head and example.answer.startswith(" ") and head + example.answer == ANSWER
    messages = [
        {"role": "system", "content": SYSTEM},
        *as_json(TURNS),
        {"role": "assistant", "content": head},
    ]
    request = chat.prepare({"messages": messages, **fields(way)}, NAME, settings(way)).request
    assert ids(request) == [prompt_ids(example)]


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("way", [way for way in TOOL_WAYS if way in SENT], ids=str)
def test_tools_are_offered_and_called_in_the_form_of_the_template(way, choice):
    tool = tooluse.draw_tool(Random(4), tooluse.WEATHER)
    call = tool.call("Paris")
    chosen = {"type": "function", "function": {"name": tool.name}} if choice == "named" else choice
    example = made(way, tools=[tool.spec], choice=chosen, call=call)
    messages = [{"role": "system", "content": SYSTEM}, *as_json(TURNS)]
    body = {"messages": messages, "tools": [tool.spec], "tool_choice": chosen, **fields(way)}
    prepared = chat.prepare(body, NAME, settings(way))
    assert ids(prepared.request) == [prompt_ids(example)]
    message = prepared.reply.whole_choice(RowDelta(0, example.answer, 1, "stop"))["message"]
    (found,) = (each["function"] for each in message["tool_calls"])
    assert (found["name"], found["arguments"]) == call and not message["content"]
    assert bool(message.get("reasoning_content")) == way.style.thinks


@pytest.mark.parametrize("way", [way for way in TOOL_WAYS if way in SENT], ids=str)
def test_results_of_tools_stand_where_the_template_has_them(way):
    tool = tooluse.draw_tool(Random(4), tooluse.WEATHER)
    name, arguments = tool.call("Paris")
    result = '{"sky": "sunny"}'
    turns = [Message("user", ASKED), Message("assistant", "", ((name, arguments),)), Message("tool", result)]
    sent = [
        {"role": "user", "content": ASKED},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        },
        {"role": "tool", "content": result},
    ]
    body = {"messages": sent, "system": SYSTEM, "tools": [tool.spec], **fields(way)}
    example = made(way, turns, tools=[tool.spec])
    assert ids(chat.prepare(body, NAME, settings(way)).request) == [prompt_ids(example)]


@pytest.mark.parametrize("way", SENT, ids=str)
def test_the_server_reads_the_answer_out_of_what_is_trained(way):
    reader = AnswerReader(way.style.thought)
    piece = reader.feed(made(way).answer) + reader.finish()
    assert piece.content == ANSWER and bool(piece.reasoning) == way.style.thinks


def translated(body: dict) -> GenerateRequest:
    """What the route of Immersive Translate asks the bundled model for."""
    asked, make = IMMERSIVE.read(body)
    return prepare_translation(asked, make, MODEL, FrontendConfig(), IMMERSIVE.shape).request


def test_translations_and_gaps_are_those_of_their_routes():
    rng = Random(2)
    body = {"source_lang": "en", "target_lang": "zh-CN", "text_list": ["Hello!"]}
    examples = [render(rng, "x", "Hello!", "你好！", "en", "zh-CN") for _ in range(60)]
    assert tuple(ids(translated(body))[0]) in {tuple(prompt_ids(e)) for e in examples}
    foreign = {"target_lang": "en", "text_list": ["Bonjour !"]}
    examples = [render(rng, "x", "Bonjour !", "Hello!", "fr", "en") for _ in range(60)]
    assert tuple(ids(translated(foreign))[0]) in {tuple(prompt_ids(e)) for e in examples}
    example = fim(rng, False)
    after, before = example.prompt.removeprefix("✿prefix✿✿suffix✿").split("✿middle✿")
    body = {"prefix": [before], "suffix": [after]}
    assert ids(batch.fim(body, NAME).request) == [prompt_ids(example)]


def test_what_most_clients_send_is_drawn_most():
    assert WAYS[CHAT] == max(WAYS.values()) and WAYS[CHAT] > 0.25 * sum(WAYS.values())
