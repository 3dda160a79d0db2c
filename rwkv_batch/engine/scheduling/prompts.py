"""Prompts as token ids."""

from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest


class PromptEncoder:
    """Prompts for a model with `vocab` tokens. Methods raise ValueError for a token that it does not have."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab

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
