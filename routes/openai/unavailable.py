"""Fields of other servers that would change a text and that no route has.

They are refused, so that nobody takes a text for what it is not. Other fields that are not known are ignored,
as OpenAI's protocol grows.
"""

OTHER_NAME = "this is another server's name; GET /docs lists the fields of this route"
UNAVAILABLE = {
    "stop_token_ids": "this server takes stop_tokens: ids and strings, in place of its own",
    "min_tokens": "texts have no least length here; ignore_eos goes on to the limit",
    "bad_words": "logit_bias makes tokens unlikely here",
    "allowed_token_ids": "guided_choice, guided_regex and guided_grammar say what a text may be",
    "include_stop_str_in_output": "a stop string is no part of a text here",
    "truncate_prompt_tokens": "prompts are read whole, as they may have any length",
    "prompt_logprobs": "logprobs of a prompt are those of /v1/completions with echo",
    "use_beam_search": "texts are drawn here, not searched for",
    "chat_template": "chats are rendered as the model was trained; /v1/completions takes any prompt",
    "documents": "put them into a message",
    **dict.fromkeys(
        (
            "num_predict",
            "n_predict",
            "max_output_tokens",
            "max_new_tokens",
            "stop_sequences",
            "repeat_penalty",
            "grammar",
            "json_schema",
            "format",
            "options",
            "instructions",
        ),
        OTHER_NAME,
    ),
}
