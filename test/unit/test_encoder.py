"""The compiled encoder against that of the package, and where it cannot be compiled."""

import random
from pathlib import Path

import pyrwkv_tokenizer
import pytest
from serving import ROOT

from rwkv_batch.ops.compiled.libraries import BuildError
from rwkv_batch.text import tokenizer
from rwkv_batch.text.encoder import new_encoder
from rwkv_batch.text.tokenizer import Tokenizer

BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture(scope="module")
def package():
    return pyrwkv_tokenizer.RWKVTokenizer()


@pytest.fixture(scope="module")
def compiled():
    ours = Tokenizer()
    return new_encoder([ours.token_bytes(token) for token in range(tokenizer.VOCABULARY)])


def texts_of_tokens():
    """Every token that is text, and pairs of any tokens."""
    ours, draw = Tokenizer(), random.Random(0)
    pieces = [ours.token_bytes(token) for token in range(tokenizer.VOCABULARY)]
    pairs = (draw.choice(pieces) + draw.choice(pieces) for _ in range(20_000))
    return [piece.decode(errors="ignore") for piece in (*pieces, *pairs)]


def random_texts():
    draw = random.Random(1)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for _ in range(2000):
        some = draw.sample(planes, draw.randint(1, 5))
        yield "".join(chr(draw.randint(*draw.choice(some))) for _ in range(draw.randint(0, 300)))


def test_every_token_and_pair_is_encoded_as_by_the_package(compiled, package):
    for text in texts_of_tokens():
        assert compiled(text) == package.encode(text), text


def test_random_texts_are_encoded_as_by_the_package(compiled, package):
    for text in random_texts():
        assert compiled(text) == package.encode(text), text


@pytest.mark.parametrize(
    "text", ["a", " ", "\n", "0", "=", "世", "🦄", "ab", "\x00", "é", " \t", "\U0010ffff"]
)
@pytest.mark.parametrize("times", [127, 128, 129, 511, 512, 513, 20_000])
def test_long_runs_are_encoded_as_by_the_package(compiled, package, text, times):
    assert compiled(text * times) == package.encode(text * times)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "CHANGELOG.md", "ARCHITECTURE.md"])
def test_real_texts_are_encoded_as_by_the_package(compiled, package, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    ids = compiled(text)
    assert ids == package.encode(text) and Tokenizer().decode(ids) == text


def test_what_is_no_text_is_refused(compiled):
    with pytest.raises(UnicodeEncodeError):
        compiled("ab\udfff")
    with pytest.raises(TypeError):
        compiled(b"ab")
    with pytest.raises(TypeError):
        compiled()
    assert compiled("ab") == Tokenizer().encode("ab")


def test_the_longest_token_counts_whatever_lies_between():
    """The last one has beginnings that are no tokens, and a text may end in one of them."""
    encode = new_encoder([b"", *BYTES, b"ab", b"abcde"])
    assert encode("abcde") == [258] and encode("abcd") == [257, *(byte + 1 for byte in b"cd")]
    assert encode("abcdabcde") == [257, *(byte + 1 for byte in b"cd"), 258]


@pytest.mark.parametrize("table", [BYTES[:-1], [*BYTES, *[b"a" * 9] * 65_535], [*BYTES, b"a" * (1 << 20)]])
def test_a_table_that_does_not_fit_is_refused(table):
    with pytest.raises(ValueError, match="An encoder takes at most"):
        new_encoder(table)


def test_without_a_compiler_the_package_encodes(monkeypatch):
    def refuse(table: list[bytes]) -> None:
        raise BuildError("There is no C++ compiler; install g++, or name one in CXX.")

    monkeypatch.setattr(tokenizer, "new_encoder", refuse)
    path = Path(pyrwkv_tokenizer.__file__).with_name("rwkv_vocab_v20230424.txt")
    encode = tokenizer.encoder_of.__wrapped__(path)
    assert encode("User") == [24281]
