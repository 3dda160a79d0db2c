"""The shapes of replies that are no stream: OpenAI's, and those of the tokenizer. They document."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "paused", "error"]


class RowError(TypedDict):
    message: str
    type: Literal["server_error"]
    param: None
    code: None


class LikelyToken(TypedDict):
    token: str
    bytes: list[int]
    logprob: float


class DrawnToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(TypedDict):
    content: list[DrawnToken]
    refusal: None


class MadeFunction(TypedDict):
    name: str
    arguments: str  # JSON text


class MadeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: MadeFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MadeCall]]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    error: NotRequired[RowError]  # why the choice has ended, while others went on
    token_ids: NotRequired[list[int]]


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    accepted_prediction_tokens: int  # of drafts, those that have been generated
    rejected_prediction_tokens: int  # and those that have not


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]  # where there were drafts (--speculate)


class ChatCompletion(TypedDict):
    """An answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[str]  # of the weights
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: NotRequired[list[int]]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    error: NotRequired[RowError]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class TextCompletion(TypedDict):
    """The texts behind prompts, in the order of the prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[str]
    choices: list[TextChoice]
    usage: CompletionUsage


class ServedModel(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: NotRequired[str]  # the model of an adapter


class ServedModels(TypedDict):
    object: Literal["list"]
    data: list[ServedModel]


class ModelName(TypedDict):
    object: Literal["models"]
    id: str


class LoadProgress(TypedDict):
    model: str
    stage: Literal["reading", "preparing", "draining"]
    progress: float  # of reading, 0 to 1


class Health(TypedDict):
    """Whether requests are taken; the model is named to those who may use it."""

    status: str
    model: NotRequired[str]
    token_ids_only: NotRequired[list[str]]  # models whose vocabulary is not World's
    loading: NotRequired[list[LoadProgress]]


class TextTokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class TokensText(TypedDict):
    prompt: str


class TokenNumber(TypedDict):
    tokens: int


class TokenizerInfo(TypedDict):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str
    eos_token: str
    bos_token_id: int
    eos_token_id: int
    add_bos_token: bool  # in front of chats
    chat_template: str  # Jinja
