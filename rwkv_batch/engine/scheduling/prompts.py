"""Prompts: their tokens, and what is sent of them."""

from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer
from rwkv_batch.wire.protocol import Accepted, GenerateRequest


class PromptEncoder:
    """Prompts for a model with `vocab` tokens. Methods raise ValueError for a token that it does not have."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab

    def check(self, request: GenerateRequest) -> None:
        """Raises ValueError for no prompt, texts where there are only ids, logprobs that cannot be had."""
        if not request.prompts or request.n < 1:
            raise ValueError("The request asks for no text; give a prompt, and n of 1 or more.")
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if texts or request.stop_strings or request.late_stops or request.grammar or request.prediction:
            self._tokenizer.demand_texts()
        if request.mixture and request.prompt_logprobs is not None:
            raise ValueError("A prompt has no logprobs in a mixture of states; name one start state.")

    def encode(self, prompt: str | list[int], prefix_ids: list[int]) -> list[int]:
        """The ids of the prefix and the prompt; never empty."""
        ids = prefix_ids + (self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab:
            foreign = next(token for token in ids if not 0 <= token < self._vocab)
            raise ValueError(
                f"The prompt holds token {foreign}; this model's tokens are 0 to {self._vocab - 1}."
            )
        return ids or [END_OF_TEXT]  # an RNN needs something to start from

    def encode_turn(self, request: GenerateRequest, separator: str | None) -> list[int]:
        """The only prompt of a request. `separator`: what a state is continued with; None: there is none."""
        prompt = request.prompts[0]
        if separator and isinstance(prompt, str) and not prompt.startswith(separator):
            prompt = separator + prompt
        return self.encode(prompt, request.prefix_ids if separator is None else [])

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
