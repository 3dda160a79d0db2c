"""A row's text, stops and deltas, token by token."""

import pytest

from rwkv_batch.engine.rows.lives import Fresh
from rwkv_batch.engine.scheduling.prompts import PromptEncoder
from rwkv_batch.engine.scheduling.row import Row, RowDraws
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import GenerateRequest, LateStops, RowDelta, TokenLogprob


def row_of(request: GenerateRequest) -> Row:
    return Row((b"test", "r"), 0, [5], request, Fresh(None, None), RowDraws(seed=0))


def drive(pieces: list[bytes], logprobs: bool = False, **fields) -> list[RowDelta]:
    """Draw tokens 1, 2, 3... with these bytes; the deltas of the row until it ends."""
    request = GenerateRequest(**{"id": "r", "prompts": [[5]], "max_tokens": 99} | fields)
    row = row_of(request)
    deltas = []
    for token, data in enumerate(pieces, 1):
        row.take_drawn(token, data, TokenLogprob(data, -float(token), []) if logprobs else None)
        delta = row.text.next_delta(row.drawn)
        if delta:
            deltas.append(delta)
        if row.text.finish_reason:
            break
    return deltas


def test_text_leaves_every_flush_tokens_and_at_the_end():
    deltas = drive([b"a", b"b", b"c", b"d", b"e"], max_tokens=5, flush_tokens=2)
    assert [(d.text, d.tokens, d.finish_reason) for d in deltas] == [
        ("ab", 2, None),
        ("cd", 2, None),
        ("e", 1, "length"),
    ]


def test_without_flush_everything_comes_at_the_end():
    assert drive([b"a", b"b"], max_tokens=2) == [RowDelta(0, "ab", 2, "length")]


def test_a_stop_id_is_neither_shown_nor_counted():
    assert drive([b"a", b"END"], stop_ids=[2]) == [RowDelta(0, "a", 1, "stop")]


def test_a_character_in_pieces_leaves_whole():
    unicorn = "🦄".encode()
    deltas = drive([b"x", unicorn[:1], unicorn[1:3], unicorn[3:], b"y"], max_tokens=5, flush_tokens=1)
    assert [d.text for d in deltas] == ["x", "🦄", "y"]
    assert sum(d.tokens for d in deltas) == 5


def test_a_cut_character_becomes_one_replacement_character():
    assert drive([b"x", "🦄".encode()[:2]], max_tokens=2)[-1].text == "x\ufffd"


def test_a_stop_string_over_tokens_is_cut_out_and_never_shown():
    deltas = drive([b"Hi", b"\n", b"\nUs", b"er: more"], stop_strings=["\n\nUser:"], flush_tokens=1)
    assert "".join(d.text for d in deltas) == "Hi"
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", "\n\nUser:")


@pytest.mark.parametrize(
    ("before", "behind"), [("Hi", "✿\nUser"), ("Hi", "🦄✿"), ("Hi🦄", "✿"), ("Hi ", "\n\nUser:")]
)
def test_the_tokens_of_what_was_shown_have_no_part_of_a_stop_string(before: str, behind: str):
    """Its first character may be of several tokens."""
    tokenizer = Tokenizer()
    drawn = [*tokenizer.encode(before), *tokenizer.encode(behind)]
    request = GenerateRequest(id="r", prompts=[[5]], max_tokens=99, stop_strings=[behind])
    row = row_of(request)
    for token in drawn:
        row.take_drawn(token, tokenizer.token_bytes(token), None)
    assert row.text.finish_reason == "stop"
    assert row.text.shown_tokens(row.drawn, tokenizer) == tokenizer.encode(before)


def test_text_that_only_resembles_a_stop_string_comes_out_whole():
    deltas = drive(
        [b"Hi", b"\n\nUs", b"ual", b"\n\n"], stop_strings=["\n\nUser:"], flush_tokens=1, max_tokens=4
    )
    assert "".join(d.text for d in deltas) == "Hi\n\nUsual\n\n"
    assert deltas[-1].finish_reason == "length"


def test_late_stops_wait_for_the_end_of_the_thought():
    pieces = [b"Is", b" it", b" ok", b"?</th", b"ink>It", b" is", b" ok", b" now"]
    late = LateStops([" ok"], "<think>", "</think>", inside=True, rest=">")
    deltas = drive(pieces, late_stops=late, stop_strings=["\nUser:"], flush_tokens=1)
    assert "".join(d.text for d in deltas) == "Is it ok?</think>It is"
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", " ok")
    cut = drive([b"Is", b"\nUser", b": a"], late_stops=late, stop_strings=["\nUser:"])
    assert [(d.text, d.finish_reason) for d in cut] == [("Is", "stop")]
    # nothing of a thought opens this text
    late = LateStops([" ok"], "<think>", "</think>")
    assert drive([b"<th", b"at is ok"], late_stops=late)[-1].text == "<that is"


def test_a_leading_token_stands_in_front_of_a_conversation_once():
    encoder = PromptEncoder(Tokenizer(), 65536)
    request = GenerateRequest("r", ["User: Hi"], 8, prefix_ids=[0])
    hi = Tokenizer().encode("User: Hi")
    assert encoder.encode_turn(request, separator=None) == [0, *hi]
    assert encoder.encode_turn(request, separator="\n\n") == Tokenizer().encode("\n\nUser: Hi")


def test_logprobs_come_with_their_text_and_end_with_it():
    deltas = drive(
        [b"Hi", b" S", b"TOP", b"!"], logprobs=True, stop_strings=["STOP"], flush_tokens=1, top_logprobs=0
    )
    entries = [entry.token for d in deltas for entry in d.logprobs]
    assert entries == [b"Hi", b" S"]  # the second begins before the end of the text, " "
    for delta in deltas[:-1]:
        assert delta.logprobs and delta.text


@pytest.mark.parametrize("cut", range(8))
@pytest.mark.parametrize(
    "text, stops",
    [("aé🦄b", []), ("x\n\nUse it", ["\n\nUser:"]), ("y\n\nUser: more", ["\n\nUser:"])],
    ids=["characters in pieces", "resembles a stop string", "stop string"],
)
def test_a_pause_inside_what_is_held_back_loses_and_doubles_nothing(text: str, stops: list[str], cut: int):
    tokenizer = Tokenizer()
    tokens = [byte + 1 for byte in text.encode()]  # the tokens of single bytes
    request = GenerateRequest("r", [[5]], 8, stop_strings=stops, flush_tokens=1)

    def draw(row: Row, tokens: list[int]) -> list[RowDelta]:
        deltas = []
        for token in tokens:
            row.take_drawn(token, tokenizer.token_bytes(token), None)
            if delta := row.text.next_delta(row.drawn):
                deltas.append(delta)
        return deltas

    whole = draw(row_of(request), tokens[:8])
    first = row_of(request)
    deltas = draw(first, tokens[:cut])
    first.text.finish_reason = "paused"
    deltas.append(first.text.take(first.drawn))
    assert deltas[-1].finish_reason == "paused"
    second = row_of(request)
    second.resume(first.drawn, tokenizer)
    deltas += draw(second, tokens[cut:8])
    assert "".join(delta.text for delta in deltas) == "".join(delta.text for delta in whole)
    assert sum(delta.tokens for delta in deltas) == sum(delta.tokens for delta in whole) == 8
    assert deltas[-1].finish_reason == whole[-1].finish_reason is not None
