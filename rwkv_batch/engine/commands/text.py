"""Commands about the vocabulary: texts to tokens, and back."""

from itertools import chain

from rwkv_batch.engine.commands.reply import reply
from rwkv_batch.engine.scheduling.sequence import Outbox, RequestKey
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.commands import Detokenize, TextCommand, Tokenize
from rwkv_batch.wire.protocol import Rejected


class TextCommands:
    """Carries commands out. Their replies go to the outbox at once."""

    def __init__(self, tokenizer: Tokenizer, outbox: Outbox) -> None:
        self._tokenizer, self._outbox = tokenizer, outbox

    def run(self, request: RequestKey, command: TextCommand) -> None:
        try:
            self._tokenizer.demand_texts()
            self._answer(request, command)
        except ValueError as error:
            self._outbox.append((request, Rejected(request[1], "invalid", str(error))))

    def _answer(self, request: RequestKey, command: TextCommand) -> None:
        """Raises ValueError."""
        data = self._tokenizer.token_bytes
        match command:
            case Tokenize(texts=texts):
                ids = [self._tokenizer.encode(text) for text in texts]
                pieces = [data(token) for token in chain.from_iterable(ids)]
                reply(self._outbox, request, None, token_ids=ids, token_bytes=pieces)
            case Detokenize(tokens=tokens):
                reply(self._outbox, request, None, token_bytes=[data(token) for token in tokens])
