"""Prompts: their tokens, and what is sent of them."""

from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer
from rwkv_batch.wire.protocol import Accepted, GenerateRequest


class PromptEncoder:
    """Prompts for a model with `vocab` tokens. Methods raise ValueError for a token that it does not have."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab

    def check(self, request: GenerateRequest) -> None:
        """Raises ValueError for texts where there are only ids, a turn of several prompts, and logprobs that
        a prompt cannot have.
        """
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if texts or request.stop_strings or request.late_stops or request.grammar:
            self._tokenizer.demand_texts()
        _check_prompts(request)

    def encode(self, prompt: str | list[int], prefix_ids: list[int]) -> list[int]:
        """The ids of the prefix and the prompt; never empty."""
        ids = prefix_ids + (self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab:
            foreign = next(token for token in ids if not 0 <= token < self._vocab)
            raise ValueError(
                f"The prompt holds token {foreign}; this model's tokens are 0 to {self._vocab - 1}."
            )
        return ids or [END_OF_TEXT]  # an RNN needs something to start from

    def encode_turn(self, request: GenerateRequest, continued: bool) -> list[int]:
        """The prompt of a turn. `continued`: it follows a stored state, and the separator comes first."""
        prompt, separator = request.prompts[0], request.turn.separator if request.turn else ""
        if continued and isinstance(prompt, str) and not prompt.startswith(separator):
            prompt = separator + prompt
        return self.encode(prompt, [] if continued else request.prefix_ids)

    def accepted(
        self,
        request: GenerateRequest,
        prompts: list[list[int]],
        cached: list[int],
        target: str | None,
        fingerprint: str,
    ) -> Accepted:
        """The first event of a request that is in the queue. prompts: encoded."""
        data = self._tokenizer.token_bytes
        return Accepted(
            request.id,
            [len(prompt) for prompt in prompts],
            cached if any(cached) else [],
            target or "",
            fingerprint,
            prompts if request.return_ids else [],
            [[data(token) for token in prompt] for prompt in prompts] if request.return_bytes else [],
        )


def _check_prompts(request: GenerateRequest) -> None:
    if request.turn and (len(request.prompts) != 1 or request.n != 1):
        raise ValueError(f"A turn has one prompt, not {len(request.prompts)} times {request.n}.")
    if request.prompt_logprobs is None:
        return
    if request.turn:
        raise ValueError("The prompt of a session's turn has no logprobs; send it without a session.")
    if request.mixture:
        raise ValueError("A prompt has no logprobs in a mixture of states; name one start state.")
