"""The RWKV World vocabulary: text to ids, ids to bytes, and bytes back to text as they come.

Tokens are pieces of UTF-8, not of text: a token may begin or end inside a character. Ids are therefore turned
into bytes here, and bytes into text by a decoder that keeps what is incomplete.
"""

import ast
import codecs
from pathlib import Path

import pyrwkv_tokenizer

VOCABULARY = 65530  # ids 0..65529; a model's head may have more rows, which stand for nothing
END_OF_TEXT = 0  # has no bytes, and no text encodes to it

Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Tokenizer:
    """Greedy longest match over UTF-8 bytes; nothing is put before or after the text."""

    def __init__(self) -> None:
        vocabulary = Path(pyrwkv_tokenizer.__file__).with_name("rwkv_vocab_v20230424.txt")
        self._bytes = _read_table(vocabulary)
        self._encoder = pyrwkv_tokenizer.RWKVTokenizer(vocab_filepath=str(vocabulary))

    def encode(self, text: str) -> list[int]:
        """Raises ValueError when `text` is not valid Unicode, that is, has a lone surrogate."""
        try:
            return self._encoder.encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"The text has half of a surrogate pair, U+{ord(text[error.start]):04X}, at character "
                f"{error.start}; send valid Unicode."
            ) from None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; none for END_OF_TEXT and for ids outside the vocabulary."""
        return self._bytes[token] if 0 <= token < VOCABULARY else b""


def _read_table(path: Path) -> list[bytes]:
    """One line a token: its id, a Python literal (str or bytes), its length in bytes."""
    table = [b""] * VOCABULARY
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            number, rest = line.split(" ", 1)
            literal, length = rest.rsplit(" ", 1)
            token = ast.literal_eval(literal)
            data = token.encode() if isinstance(token, str) else token
            if len(data) != int(length):
                raise ValueError(
                    f"{path} is damaged: token {number} should have {int(length)} bytes; reinstall "
                    "pyrwkv-tokenizer."
                )
            table[int(number)] = data
    return table


class TextDecoder:
    """UTF-8 to text in pieces: what comes out, joined, is `bytes.decode("utf-8", "replace")` of what went in,
    joined.
    """

    def __init__(self) -> None:
        self._decoder = Utf8Decoder("replace")

    def feed(self, data: bytes) -> str:
        """The text that `data` completes; the bytes of a character that is still incomplete are kept."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """One U+FFFD if the bytes ended inside a character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
