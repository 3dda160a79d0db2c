"""What of a checkpoint's name, of flags and of fields becomes a prompt, its stops and its sampling."""

from dataclasses import replace

import pytest

from routes.http.errors import ApiError
from routes.native import batch
from routes.openai import chat
from routes.responses import prepare as responses
from routes.responses.schemas import ResponsesBody
from rwkv_batch.chat.checkpoints import chat_template_name
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.protocol import LateStops, Sampling

SETTINGS = FrontendConfig()
HI = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES = ("chat", "v3", "responses")


def request(route, model="rwkv7-g1k-7.2b", settings=SETTINGS, **fields):
    """What the engine gets from a route for the message "Hi"."""
    if route == "responses":
        body = ResponsesBody.from_json({"input": "Hi", **fields}, settings.sampling_profile)
        return responses.prepare(body, model, None, settings)[0]
    prepare = {"chat": chat.prepare, "v3": batch.v3}[route]
    return prepare({**HI, **fields}, model, settings).request


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("rwkv7-demo", "g1"),
        ("rwkv7-g1c-7.2b-20251231-ctx8192", "g1c"),
        ("RWKV7-G1k-1.5B-20260930", "g1c"),
        ("RWKV7-g1h-7.2B-20260710-ctx10240", "g1c"),
        ("rwkv7-g2-1.5b", "g1c"),
        ("rwkv7-g1-1.5b-20250429-ctx4096", "g1"),
        ("rwkv7-g1a4-2.9b-20251118-ctx8192", "g1"),
        ("rwkv7-g1b-1.5b", "g1"),
        ("rwkv7-g0a2-7.2b", "g1"),
        ("RWKV-x070-World-2.9B-v3-20250211-ctx4096", "world"),
        ("RWKV-x060-World-1B6-v2.1", "world"),
        ("my-finetune-of-rwkv7-g1f-2.9b-lora", "g1c"),
        ("something else", "g1"),
        ("rwkv7-demo-pirate", "g1"),
    ],
)
def test_a_name_says_what_the_checkpoint_was_trained_on(model, name):
    assert chat_template_name(model, "auto") == name
    assert chat_template_name(model, "world") == "world"


@pytest.mark.parametrize(
    ("model", "prompt", "lead"),
    [
        ("rwkv7-demo", "User: Hi\n\nAssistant: <think>\n</think>\n", [0]),
        ("RWKV-x070-World-1.5B", "User: Hi\n\nAssistant:", [0]),
        ("rwkv7-g1a-1.5b", "User: Hi\n\nAssistant: <think>\n</think>\n", [0]),
        ("rwkv7-g1c-1.5b", "User: Hi\n\nAssistant: <think></think", [0]),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_checkpoint_gets_its_prompt(route, model, prompt, lead):
    made = request(route, model)
    bare = route == "v3"  # whose answers begin with the line feed, as its clients know it
    assert (made.prompts, made.prefix_ids) == ([prompt.rstrip("\n") if bare else prompt], lead)
    other = request(
        route, "rwkv7-g1k-1.5b", replace(SETTINGS, chat_template=chat_template_name(model, "auto"))
    )
    assert (other.prompts, other.prefix_ids) == (made.prompts, lead), "the flag wins"


def test_questions_of_v3_are_rendered_like_conversations():
    made = batch.v3({"contents": ["Hi", "Ho"]}, "rwkv7-g1k-1.5b", SETTINGS).request
    assert made.prefix_ids == [0]
    assert made.prompts == [f"User: {text}\n\nAssistant: <think></think" for text in ("Hi", "Ho")]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"think_type": "none"}, "Hi\n\nAssistant:"),
        ({"think_type": "fast"}, "Hi\n\nAssistant: <think></think"),
        ({"think_type": "free"}, "Hi\n\nAssistant: <think"),
        ({"think_type": "preferChinese"}, "Hi\n\nAssistant: <think>嗯"),
        ({"think_type": "en"}, "Hi (think)\n\nAssistant: <think"),
        ({"think_type": "enShort"}, "Hi (think a bit)\n\nAssistant: <think"),
        ({"think_type": "en_short"}, "Hi (think a bit)\n\nAssistant: <think"),
        ({"think_type": "enLong"}, "Hi (think a lot)\n\nAssistant: <think"),
        ({"think_type": "en_long"}, "Hi (think a lot)\n\nAssistant: <think"),
        ({"enable_think": True}, "Hi\n\nAssistant: <think"),
        ({"think": True}, "Hi\n\nAssistant: <think"),
        ({"think": False, "enable_think": False}, "Hi\n\nAssistant: <think></think"),
        ({"think_type": "fast", "enable_think": True}, "Hi\n\nAssistant: <think></think"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "Hi\n\nAssistant: <think"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Hi\n\nAssistant: <think></think"),
        ({"chat_template_kwargs": {}}, "Hi\n\nAssistant: <think></think"),
        (
            {"chat_template_kwargs": {"rwkv_generation_prompt": "open_think"}, "think_type": "en"},
            "Hi (think)\n\nAssistant: <think",
        ),
        (
            {"chat_template_kwargs": {"rwkv_prompt_template": "bot", "rwkv_generation_prompt": "open_think"}},
            "User✿Hi✿\nBot✿<think",
        ),
        (
            {"chat_template_kwargs": {"rwkv_prompt_template": "bot", "rwkv_generation_prompt": "fake_think"}},
            "User✿Hi✿\nBot✿<think></think",
        ),
        (
            {"chat_template_kwargs": {"rwkv_prompt_template": "function_calling"}, "think": True},
            "### User\nHi\n### Assistant\n<think",
        ),
        ({"chat_template_kwargs": {"rwkv_prompt_template": "assistant"}}, "Assistant: <think></think"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_fields_choose_form_and_thought(route, fields, end):
    (prompt,) = request(route, **fields).prompts
    assert prompt.endswith(end)


def test_thinking_is_switched_as_by_deepseeks_clients():
    assert request("chat", thinking={"type": "enabled"}).prompts[0].endswith("Assistant: <think")
    assert request("chat", thinking={"type": "disabled"}).prompts[0].endswith("<think></think")
    with pytest.raises(ApiError, match=r"^thinking: this contradicts think"):
        request("chat", thinking={"type": "disabled"}, think=True)
    with pytest.raises(ApiError, match=r"^thinking: a thought is asked for by"):
        request("responses", thinking={"type": "enabled"})


def test_an_effort_of_none_does_not_think():
    for fields, end in (("none", "<think></think"), ("minimal", "<think></think"), ("low", "<think")):
        for route in ("chat", "v3"):
            assert request(route, reasoning_effort=fields).prompts[0].endswith(end)
        assert request("responses", reasoning={"effort": fields}).prompts[0].endswith(end)
    assert request("chat", "RWKV-x070-World-1.5B", reasoning_effort="none").prompts == [
        "User: Hi\n\nAssistant:"
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"think_type": "deep"}, "think_type", "'none', 'fast', 'free', 'preferChinese', 'en', 'enShort'"),
        ({"think_type": True}, "think_type", "'en_long'"),
        ({"think": "perhaps"}, "think", "true or false"),
        ({"chat_template_kwargs": "bot"}, "chat_template_kwargs", "an object"),
        (
            {"chat_template_kwargs": {"rwkv_prompt_template": "chatml"}},
            "chat_template_kwargs",
            "assistant, bot, function_calling",
        ),
        (
            {"chat_template_kwargs": {"rwkv_generation_prompt": ["open_think"]}},
            "chat_template_kwargs",
            "open_think, fake_think",
        ),
        (
            {"chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs",
            "rwkv_prompt_template, rwkv_generation_prompt and enable_thinking",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs", "one of true, false"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "think": False},
            "chat_template_kwargs.enable_thinking",
            "think",
        ),
        ({"think_type": "free", "reasoning_effort": "none"}, "reasoning_effort", "think_type"),
        (
            {"think_type": "fast", "chat_template_kwargs": {"rwkv_generation_prompt": "open_think"}},
            "chat_template_kwargs",
            "think_type",
        ),
        ({"enable_think": True, "think": False}, "think", "enable_think"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'minimal'"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_what_is_unknown_or_contradicts_is_refused(route, fields, param, words):
    if route == "responses" and "reasoning_effort" in fields:
        words = "reasoning.effort"  # what this route calls it
    with pytest.raises(ApiError) as raised:
        request(route, **fields)
    error = raised.value
    assert (error.status, error.param) == (400, param)
    assert words in error.message and error.message.endswith(".") and "\n" not in error.message


@pytest.mark.parametrize(
    ("form", "stops"),
    [
        ("assistant", ["\n\nUser:", "\nUser:"]),
        ("bot", ["✿"]),
        ("function_calling", ["\n### User", "\n### Tool Output"]),
    ],
)
def test_every_form_has_its_stops_and_separator(form, stops):
    kwargs = {"chat_template_kwargs": {"rwkv_prompt_template": form}}
    made = request("chat", session_id="s", **kwargs)
    assert (made.stop_ids, made.stop_strings) == ([0], stops)
    assert made.turn.separator == {"assistant": "\n\n", "bot": "✿\n", "function_calling": "\n"}[form]
    assert request("responses", **kwargs).stop_strings == stops
    v3 = request("v3", **kwargs)
    if form == "assistant":
        assert (v3.stop_ids, v3.stop_strings) == ([0, 261, 24281], []), "what its clients expect"
    else:
        assert (v3.stop_ids, v3.stop_strings) == ([0], stops)
    assert request("v3", stop_tokens=[5], **kwargs).stop_ids == [5]


@pytest.mark.parametrize(
    ("model", "fields", "inside", "rest"),
    [
        ("rwkv7-g1k", {"think": True}, True, ">"),
        ("rwkv7-g1k", {"think_type": "preferChinese"}, True, ""),
        ("rwkv7-g1k", {}, False, ">"),
        ("rwkv7-g1a", {}, False, ""),
        ("RWKV-x070-World", {}, False, ""),
    ],
)
def test_stops_of_the_client_wait_for_the_end_of_the_thought(model, fields, inside, rest):
    late = LateStops(["END"], "<think>", "</think>", inside, rest)
    for route in ("chat", "responses"):
        assert request(route, model, stop="END", **fields).late_stops == late
    v3 = request("v3", model, stop_tokens=["END", 7], **fields)
    assert (v3.stop_ids, v3.stop_strings, v3.late_stops) == ([7], [], late)


def test_an_answer_that_is_continued_has_no_thought():
    messages = [*HI["messages"], {"role": "assistant", "content": "Good"}]
    made = chat.prepare({"messages": messages, "stop": "END", "think": True}, "rwkv7-g1k", SETTINGS).request
    assert (made.prompts, made.prefix_ids) == (["User: Hi\n\nAssistant: Good"], [0])
    assert made.stop_strings[-1] == "END" and made.late_stops is None


@pytest.mark.parametrize(
    ("profile", "sampling"),
    [
        ("open_think", Sampling(0.96, 32, 0.76, 1.0, 0.1, 0.988)),
        ("fake_think", Sampling(1.0, 32, 0.28, 0.0, 0.0, 0.996)),
        ("tools", Sampling(0.96, 32, 0.76, 0.0, 0.0, 0.996)),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_profile_is_what_requests_do_not_say(route, profile, sampling):
    settings = FrontendConfig(sampling_profile=profile)
    assert request(route, settings=settings).sampling == sampling
    for field, value in (("temperature", 0.5), ("top_p", 0.5), ("top_k", 7), ("alpha_presence", 0.5)):
        changed = {**{f: getattr(sampling, f) for f in sampling.__struct_fields__}, field: value}
        assert request(route, settings=settings, **{field: value}).sampling == Sampling(**changed)


def test_openais_penalties_and_nulls_under_a_profile():
    settings = FrontendConfig(sampling_profile="open_think")
    made = request("chat", settings=settings, presence_penalty=0.5, temperature=None).sampling
    assert (made.alpha_presence, made.alpha_frequency, made.presence_penalty) == (0, 0, 0.5)
    assert (made.temperature, made.alpha_decay) == (0.96, 0.988)
