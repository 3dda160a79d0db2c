"""Commands about the vocabulary: texts to tokens, and back."""

from itertools import chain

from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal
from rwkv_batch.wire.commands import Detokenize, TextCommand, Tokenize
from rwkv_batch.wire.protocol import RequestKey


class TextCommands:
    """Carries commands out. Their replies are events at once."""

    def __init__(self, parts: EngineParts) -> None:
        self._tokenizer, self._rows = parts.tokenizer, parts.rows

    def run(self, request: RequestKey, command: TextCommand) -> None:
        data = self._tokenizer.token_bytes
        try:
            self._tokenizer.demand_texts()
            match command:
                case Tokenize(texts=texts):
                    ids = [self._tokenizer.encode(text) for text in texts]
                    pieces = [data(token) for token in chain.from_iterable(ids)]
                    self._rows.reply(request, None, token_ids=ids, token_bytes=pieces)
                case Detokenize(tokens=tokens):
                    self._rows.reply(request, None, token_bytes=[data(token) for token in tokens])
        except ValueError as error:
            raise Refusal("invalid", str(error)) from error
