"""The vocabulary against the reference tokenizer; text in pieces against text decoded at once."""

import pytest
import rwkv
from hypothesis import given, settings
from hypothesis import strategies as st
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

from rwkv_batch.text.tokenizer import END_OF_TEXT, VOCABULARY, TextDecoder, Tokenizer

MIXED = (
    "Hello 世界, 🦄🧬🫠 𠮷 ñandú\r\n\t\x00 ✿  def f(x):\n        return x\n\n"
    "Как дела? مرحبا 안녕 ✿✿User: 1234567890。\n\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer()


@pytest.fixture(scope="module")
def reference():
    return TRIE_TOKENIZER(rwkv.__path__[0] + "/rwkv_vocab_v20230424.txt")


def stream(pieces):
    decoder = TextDecoder()
    return [decoder.feed(piece) for piece in pieces] + [decoder.finish()]


def test_known_ids(tokenizer):
    assert tokenizer.encode("User") == [24281]
    assert tokenizer.encode("\n\n") == [261]
    assert tokenizer.encode("✿") == [10060]
    assert tokenizer.encode("") == []
    assert tokenizer.token_bytes(24281) == b"User"
    assert [tokenizer.token_bytes(byte + 1) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_every_token_has_the_reference_bytes(tokenizer, reference):
    assert {token: tokenizer.token_bytes(token) for token in range(1, VOCABULARY)} == reference.idx2token


@pytest.mark.parametrize("token", [END_OF_TEXT, -1, VOCABULARY, 65535, 10**9])
def test_ids_without_text(tokenizer, token):
    assert tokenizer.token_bytes(token) == b""


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from(MIXED)).map("".join),
        st.lists(st.sampled_from(MIXED.split(" "))).map(" ".join),
    )
)
def test_round_trip_and_reference_ids(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert END_OF_TEXT not in ids
    assert "".join(stream(tokenizer.token_bytes(token) for token in ids)) == text


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "x\ud83d y"])
def test_text_that_is_not_unicode(tokenizer, text):
    with pytest.raises(ValueError, match=r"surrogate pair, U\+D[0-9A-F]{3}, at character [012];"):
        tokenizer.encode(text)
    assert tokenizer.encode("still alive") != []


def test_a_character_split_over_tokens_comes_whole():
    assert stream("🦄".encode()[i : i + 1] for i in range(4)) == ["", "", "", "🦄", ""]


def test_an_incomplete_tail_becomes_one_replacement_character():
    assert stream([b"a", "🦄".encode()[:3]]) == ["a", "", "�"]
    assert stream([b"a"]) == ["a", ""]


byte_strings = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from(list(b"\xf0\x9f\xa6\x84\xe4\xed\xa0\xc3\xffa")), max_size=20).map(bytes),
)


@settings(max_examples=500, deadline=None)
@given(byte_strings, st.data())
def test_any_bytes_in_any_pieces(data, draw):
    pieces = []
    rest = data
    while rest:
        size = draw.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert "".join(stream(pieces)) == data.decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 65535), max_size=30))
def test_any_ids_stream_to_the_text_of_their_bytes(tokenizer, ids):
    pieces = [tokenizer.token_bytes(token) for token in ids]
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")
