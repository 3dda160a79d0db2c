"""The RWKV World vocabulary: text to ids, ids to bytes, and bytes to text piece by piece.

A token is a piece of UTF-8, not of text: it may begin or end inside a character. So the tokenizer gives bytes
for an id, and a decoder turns bytes into text and keeps the bytes of an incomplete character.
"""

import ast
import codecs
import logging
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pyrwkv_tokenizer

from rwkv_batch.ops.compiled.libraries import BuildError
from rwkv_batch.text.encoder import new_encoder

log = logging.getLogger(__name__)
VOCABULARY = 65530  # ids 0..65529; a model's head may have more rows, which are unused
FEWEST_ROWS = VOCABULARY  # of a head whose ids are these: with fewer, some text would have no id
MOST_ROWS = 66_560  # 65,536 as published, and 1,024 that were added: with more, the ids are others
END_OF_TEXT = 0  # has no bytes, and no text encodes to it


class Tokenizer:
    """Greedy longest match over UTF-8 bytes; adds no token before or after the text."""

    has_texts = True  # False: `encode` raises, and no id has bytes

    def __init__(self) -> None:
        vocabulary = Path(pyrwkv_tokenizer.__file__).with_name("rwkv_vocab_v20230424.txt")
        self._bytes = _read_table(vocabulary)
        self._encode = encoder_of(vocabulary)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Raises ValueError when it has a lone surrogate."""
        try:
            return self._encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text has half of a surrogate pair, U+{ord(text[error.start]):04X}, at character "
                f"{error.start}; send valid Unicode."
            ) from None

    def demand_texts(self) -> None:
        """Raises ValueError where there are only ids."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Their text, with U+FFFD for bytes that are no characters."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; none for END_OF_TEXT and for ids outside the vocabulary."""
        return self._bytes[token] if 0 <= token < VOCABULARY else b""

    def token_name(self, token: int) -> bytes:
        """What stands for the token beside its logprob: its bytes."""
        return self.token_bytes(token)


class NoTokenizer(Tokenizer):
    """In place of the vocabulary of a model whose ids are not World's: its texts are not known."""

    has_texts = False

    def __init__(self, rows: int) -> None:
        self.refusal = (
            f"This model has {rows:,} tokens, which are not those of the World vocabulary; send prompts as "
            "token ids, and no texts, stop strings or grammars."
        )

    def encode(self, text: str) -> list[int]:
        """Raises ValueError."""
        raise ValueError(self.refusal)

    def demand_texts(self) -> None:
        """Raises ValueError."""
        raise ValueError(self.refusal)

    def token_bytes(self, token: int) -> bytes:
        """None."""
        return b""

    def token_name(self, token: int) -> bytes:
        """A token by its id, in the form of vLLM where tokens are wanted as ids."""
        return f"token_id:{token}".encode()


def tokenizer_of(rows: int) -> Tokenizer:
    """For a model whose head has so many rows. Raises ValueError where not all of them can be drawn."""
    if rows > MOST_ROWS:
        raise ValueError(
            f"has {rows:,} tokens, of which only {VOCABULARY:,} could be drawn; give a model of the World "
            "vocabulary"
        )
    return Tokenizer() if rows >= FEWEST_ROWS else NoTokenizer(rows)


# The engines of a process share what is read.


@cache
def encoder_of(path: Path) -> Callable[[str], list[int]]:
    """From text to ids: by the package's own encoder, which takes 230 MB, where ours cannot be built."""
    try:
        return new_encoder(_read_table(path))
    except (BuildError, OSError) as error:
        log.info("The encoder of the vocabulary is not built, and one of 230 MB runs. %s", error)
    encode: Callable[[str], list[int]] = pyrwkv_tokenizer.RWKVTokenizer(vocab_filepath=str(path)).encode
    return encode


@cache
def _read_table(path: Path) -> list[bytes]:
    """The bytes of every id.

    A line of the file holds the id, a Python literal (str or bytes) and its length in bytes.
    Raises ValueError when a length is wrong.
    """
    table = [b""] * VOCABULARY
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            number, rest = line.split(" ", 1)
            literal, length = rest.rsplit(" ", 1)
            # Parsing takes ten times as long, and most need none.
            token = ast.literal_eval(literal) if "\\" in literal or literal[0] == "b" else literal[1:-1]
            data = token.encode() if isinstance(token, str) else token
            if len(data) != int(length):
                raise ValueError(
                    f"{path} is damaged: token {number} should have {int(length)} bytes; reinstall "
                    "pyrwkv-tokenizer."
                )
            table[int(number)] = data
    return table


class TextDecoder:
    """UTF-8 to text in pieces.

    The pieces of text, joined, equal `bytes.decode("utf-8", "replace")` of the pieces of bytes, joined.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False  # a character

    def feed(self, data: bytes) -> str:
        """The text that `data` completes. The bytes of an incomplete character are kept for the next call."""
        if not self._inside:
            try:  # most tokens are whole characters, of which this is several times faster
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    @property
    def inside(self) -> bool:
        """Whether bytes of an incomplete character are kept."""
        return self._inside

    def finish(self) -> str:
        """One U+FFFD if the bytes end inside a character, else an empty string."""
        return self._decoder.decode(b"", final=True)
