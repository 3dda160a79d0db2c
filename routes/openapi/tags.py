"""The groups of routes, in the order in which a reader wants them."""

from typing import NamedTuple


class Tag(NamedTuple):
    """A group: all paths that begin with one of these, unless a longer beginning stands in another group."""

    name: str
    description: str
    starts: tuple[str, ...]


TAGS = (
    Tag(
        "OpenAI",
        "Conversations and completions, as OpenAI's clients ask.",
        ("/v1/chat/completions", "/openai", "/v1/completions", "/v1/models", "/models"),
    ),
    Tag(
        "Responses",
        "OpenAI's responses, which are stored and continued.",
        ("/v1/responses", "/openai/v1/responses"),
    ),
    Tag(
        "Batch API",
        "Files of requests that run when nothing else does, as OpenAI's clients send them.",
        ("/v1/files", "/v1/batches", "/openai/v1/files", "/openai/v1/batches"),
    ),
    Tag("Anthropic", "Messages, as Anthropic's clients ask.", ("/v1/messages",)),
    Tag("Ollama", "Conversations, texts and models, as Ollama's clients ask.", ("/api",)),
    Tag("Editors", "What stands between two texts.", ("/infill", "/v1/fim", "/FIM")),
    Tag(
        "Batches",
        "Any number of prompts in one request.",
        ("/v1/batch/", "/v2/chat", "/v3/chat", "/big_batch"),
    ),
    Tag(
        "Translation",
        "Translations, as the clients of many services ask.",
        ("/translate", "/v2", "/v3", "/languages", "/detect", "/language/translate"),
    ),
    Tag(
        "Sessions",
        "Texts that go on where the last one ended, stored as states.",
        ("/state", "/multi_state", "/v1/state"),
    ),
    Tag(
        "Start states",
        "Tuned states in which texts begin, and mixtures of them.",
        (
            "/v1/state/upload",
            "/v1/state/list",
            "/v1/state/delete",
            "/loadstatemodel",
            "/removestatemodel",
            "/mrss_",
        ),
    ),
    Tag(
        "Models and adapters",
        "Files that are loaded and removed while the server runs.",
        ("/loadmodel", "/removemodel", "/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ),
    Tag("Tokens", "Texts as token ids.", ("/tokenize", "/detokenize", "/tokenizer_info", "/v1/tokens")),
    Tag(
        "Server",
        "Its requests, figures and pages.",
        ("/v1/server", "/health", "/cluster", "/metrics", "/stats", "/openapi.json", "/docs", "/page", "/"),
    ),
)


def tag_of(path: str) -> str:
    """The name of the group of a path."""
    found = ((len(start), tag.name) for tag in TAGS for start in tag.starts if path.startswith(start))
    return max(found)[1]
