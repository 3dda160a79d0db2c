"""Fields of other servers that would change a text and that no route has.

They are refused, so that nobody takes a text for what it is not. Other fields that are not known are ignored,
as OpenAI's protocol grows.
"""

from routes.http.errors import Json
from routes.http.schemas import asks_for_nothing

NO_LEAST = "texts have no least length here; ignore_eos goes on to the limit"
UNAVAILABLE = {
    "stop_token_ids": "this server takes stop_tokens: ids and strings, in place of its own",
    "min_tokens": NO_LEAST,
    "min_new_tokens": NO_LEAST,
    "thinking_token_budget": "a thought ends by itself, or at the limit of the text",
    "thinking": "a thought is asked for by enable_think or think_type",
    "regex": "this route takes guided_regex",
    "ebnf": "this route takes guided_grammar",
    "bad_words": "logit_bias makes tokens unlikely here",
    "allowed_token_ids": "guided_choice, guided_regex and guided_grammar say what a text may be",
    "include_stop_str_in_output": "a stop string is no part of a text here",
    "truncate_prompt_tokens": "prompts are read whole, as they may have any length",
    "prompt_logprobs": "logprobs of a prompt are those of /v1/completions with echo",
    "use_beam_search": "texts are drawn here, not searched for",
    "chat_template": "chats are rendered as the model was trained; /v1/completions takes any prompt",
    "documents": "put them into a message",
    "grammar": "this route takes guided_grammar",
    "options": "this route takes them one by one",
    "instructions": "the system's text says what holds for all of a conversation",
}
AT_LEAST_NONE = ("min_tokens", "min_new_tokens", "n_probs")  # where 0 asks for nothing
FORM = "response_format"  # a route that binds answers by another field says which where it refuses this one
NAMES_OF_FORM = ("format", "json_schema")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
# By the name of another server: ours. Clients of many servers send several at once, of which one counts.
OTHER_NAMES = {
    "num_predict": LIMITS,
    "n_predict": LIMITS,
    "max_output_tokens": LIMITS,
    "max_new_tokens": LIMITS,
    "stop_sequences": ("stop",),
    "repeat_penalty": ("repetition_penalty",),
}


def is_refused(name: str, value: object) -> bool:
    """Whether a field that is not available asks for something."""
    return not (asks_for_nothing(value) or (name in AT_LEAST_NONE and value == 0))


def other_name(fields: Json, own: set[str]) -> tuple[str, str] | None:
    """A field that a route with its `own` fields calls otherwise, and how; None: there is none."""
    if OTHER_NAMES.keys().isdisjoint(fields):
        return None
    for name, ours in OTHER_NAMES.items():
        if name not in fields or name in own or asks_for_nothing(fields[name]):
            continue
        known = [each for each in ours if each in own]
        if any(fields.get(each) is not None for each in known):
            continue
        return name, known[0]
    return None
