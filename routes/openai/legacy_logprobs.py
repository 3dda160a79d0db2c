"""The `logprobs` of a completion's row, in the form that OpenAI's completions have."""

import codecs

from routes.http.errors import Json
from routes.openai.reply import LEAST_LOGPROB
from rwkv_batch.wire.protocol import TokenLogprob


class LegacyLogprobs:
    """The logprobs of a row, piece by piece: offsets go on where the last piece ended.

    `top` is how many alternatives were asked for; the token itself always stands among them.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0  # characters of the row's text before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, tokens: list[TokenLogprob], front: bytes | None = None) -> Json:
        """The next piece. front: the prompt's first token, which has no logprob."""
        pieces = [*([] if front is None else [front]), *(t.token for t in tokens)]
        unknown: list[None] = [] if front is None else [None]
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(piece))
        return {
            "tokens": list(map(token_text, pieces)),
            "token_logprobs": [*unknown, *(max(t.logprob, LEAST_LOGPROB) for t in tokens)],
            "top_logprobs": [*unknown, *map(_top, tokens)] if self._top else None,
            "text_offset": offsets,
        }


def token_text(token: bytes) -> str:
    """Part of a character has no text of its own: it is written `bytes:\\xe4\\xbd`, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _top(given: TokenLogprob) -> dict[str, float]:
    """Likeliest first."""
    return {
        token_text(token): max(logprob, LEAST_LOGPROB)
        for token, logprob in [*given.top, (given.token, given.logprob)]
    }
