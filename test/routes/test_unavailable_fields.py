"""Fields of other servers: refused where they would change a text, by a sentence that helps."""

import pytest

from routes.anthropic.schemas import MessagesBody
from routes.http.errors import ApiError
from routes.llama_cpp.schemas import InfillBody
from routes.ollama.schemas import OllamaChatBody
from routes.openai import chat as openai_chat
from routes.openai import completions as openai_completions
from routes.openai.schemas import ChatBody, CompletionBody
from routes.responses.schemas import ResponsesBody


def chat(**fields):
    return openai_chat.prepare({"messages": [{"role": "user", "content": "Hi"}], **fields}, "m")


def complete(**fields):
    return openai_completions.prepare({"prompt": "Once", **fields}, "m")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 5),
        ("stop_token_ids", [3]),
        ("min_new_tokens", 5),
        ("bad_words", ["a"]),
        ("regex", "a+"),
        ("ebnf", 'root ::= "a"'),
        ("thinking_token_budget", 9),
        ("thinking_token_budget", 0),
        ("n_predict", 0),
        ("max_new_tokens", 0),
        ("repeat_penalty", 0.0),
        ("prompt_logprobs", 0),
        ("mirostat", 2),
        ("typical_p", 0.2),
        ("dry_multiplier", 0.9),
        ("max_new_tokens", 2),
        ("format", "json"),
    ],
)
@pytest.mark.parametrize("prepare", [chat, complete])
def test_a_field_of_another_server_that_would_change_the_text_is_refused(prepare, name, value):
    with pytest.raises(ApiError, match=f"^{name}: ") as refused:
        prepare(**{name: value})
    assert refused.value.status == 400
    assert prepare(**{name: None}) and prepare(user="me", unheard_of=1)


@pytest.mark.parametrize("nothing", [None, "", [], {}, False])
def test_what_asks_for_nothing_is_taken(nothing):
    assert chat(n_predict=nothing, thinking_token_budget=nothing, prompt_logprobs=nothing)


def test_no_least_length_is_asked_for_by_0():
    assert chat(min_tokens=0) and complete(min_new_tokens=0, min_tokens=0.0)
    assert InfillBody.from_json({"input_prefix": "a", "n_probs": 0, "n_predict": 0}).n_predict == 0


def test_samplers_that_are_not_there_may_be_off():
    assert chat(mirostat=0, typical_p=1.0, tfs_z=1, dry_multiplier=0, xtc_probability=0.0)


def test_a_chat_ends_as_the_client_says_or_is_refused():
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert chat(messages=begun, continue_final_message=True, add_generation_prompt=False)
    for name, value in (("continue_final_message", True), ("add_generation_prompt", False)):
        with pytest.raises(ApiError, match=f"^{name}: "):
            chat(**{name: value})


def test_a_client_may_send_a_field_by_several_names():
    """Clients of many servers send a limit by all its names."""
    many = {"max_tokens": 5, "max_new_tokens": 5, "n_predict": 5, "stop": ["a"], "stop_sequences": ["a"]}
    assert complete(**many).request.max_tokens == 5
    assert chat(max_completion_tokens=6, num_predict=5).request.max_tokens == 6
    with pytest.raises(ApiError, match=r"^max_new_tokens: this route calls it max_tokens"):
        chat(max_new_tokens=5)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (ChatBody, "response_format"),
        (ResponsesBody, "text.format"),
        (MessagesBody, "output_config.format"),
        (OllamaChatBody, "format"),
        (InfillBody, "json_schema"),
    ],
)
def test_the_sentence_names_the_field_that_the_route_has(body, field):
    wrong = "format" if body is InfillBody else "json_schema"
    with pytest.raises(ApiError, match=rf"^`?{wrong}`?: this route takes {field}\.?$"):
        body.from_json({wrong: {"type": "object"}})


@pytest.mark.parametrize("body", [CompletionBody, InfillBody])
@pytest.mark.parametrize("name", ["think_type", "chat_template_kwargs", "enable_think", "reasoning_effort"])
def test_a_text_that_is_no_chat_has_no_thought(body, name):
    with pytest.raises(ApiError, match=rf"^`?{name}`?: .*no chat"):
        body.from_json({"prompt": "a", name: "high"})
