"""Stop strings found in text that comes in pieces, against a search in the whole text."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_batch.text.stops import AnswerStops, StopStrings


def run(stops, pieces):
    """The shown pieces, and whether the text was stopped."""
    return run_matcher(StopStrings(stops), pieces)


def run_matcher(matcher, pieces):
    shown = []
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown.append(text)
        if stopped:
            assert matcher.stopped
            return shown, True
    shown.append(matcher.finish())
    return shown, matcher.stopped


def found_in(stops, text):
    """The stop string that comes first in a text; of those at one place the shortest."""
    return min(((at, len(s), s) for s in stops if (at := text.find(s)) >= 0), default=(0, 0, ""))[2]


def expected(stops, text):
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def test_a_stop_string_over_three_pieces():
    assert run(["\nUser:"], ["Hi.\n", "Us", "er:: no", "more"]) == (["Hi.", "", ""], True)


def test_text_is_shown_as_soon_as_it_cannot_be_a_stop():
    assert run(["\nUser:"], ["Hi.\nUs", "ed", " it\n"]) == (["Hi.", "\nUsed", " it", "\n"], False)


def test_only_the_possible_beginning_is_held():
    assert run(["ab"], ["xa", "aa", "ac"]) == (["x", "aa", "aac", ""], False)


def test_the_earliest_of_several_ends_the_text():
    assert run(["User:", "\n\nUser:"], ["Hi\n\nUser:"]) == (["Hi"], True)
    assert run(["b", "abc"], ["xab", "c"]) == (["x", ""], True)


def test_a_match_inside_a_longer_one_that_fails():
    assert run(["b", "abc"], ["xab", "d"]) == (["x", "a"], True)
    assert run(["b", "abc"], ["xab"]) == (["x", "a"], True)


def test_a_stop_string_that_overlaps_itself():
    assert run(["aab"], list("aaab")) == (["", "", "a", ""], True)


def test_no_stop_strings_hold_nothing():
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_empty_stop_strings_are_refused(stops):
    with pytest.raises(ValueError, match="empty"):
        StopStrings(stops)


letters = st.text(alphabet="ab🦄", max_size=12)


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.text(alphabet="ab🦄", min_size=1, max_size=5), max_size=3), st.lists(letters, max_size=8))
def test_any_split_gives_what_a_search_in_the_whole_text_gives(stops, pieces):
    matcher = StopStrings(stops)
    shown, stopped = run_matcher(matcher, pieces)
    assert ("".join(shown), stopped) == expected(stops, "".join(pieces))
    assert matcher.found == found_in(stops, "".join(pieces))


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.text(alphabet="abc", max_size=12),
)
def test_nothing_is_held_that_cannot_become_a_stop(stops, text):
    shown, stopped = StopStrings(stops).feed(text)
    if not stopped:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


OPEN, CLOSE = "<t>", "</t>"


@pytest.mark.parametrize(
    ("inside", "rest", "text", "shown", "stopped"),
    [
        (True, ">", ">so END so</t>is END it", ">so END so</t>is ", True),
        (True, ">", "so END so", "so END so", False),
        (True, "", "so</t>\n\nEND", "so</t>\n\n", True),
        (True, "", "so</t>\nUSER", "so</t>", True),
        (True, "", "so\nUSER so</t>", "so", True),
        (True, "", "soEN</t>D", "soEN</t>D", False),
        (True, "", "</t>\na\nEN", "</t>\na\nEN", False),
        (False, "", "\n<t>so END so</t>is END it", "\n<t>so END so</t>is ", True),
        (False, "", "is END it<t>", "is ", True),
        (False, "", "is <t>END</t>", "is <t>", True),
        (False, "", "<tEND", "<t", True),
        (False, "", "\nEND", "\n", True),
        (False, ">", "> <t>END</t>", "> <t>END</t>", False),
        (False, ">", ">\nisEND", ">\nis", True),
        (False, ">", "\n<t>END</t>", "\n<t>END</t>", False),
        (False, "", " <", " <", False),
    ],
)
def test_some_stops_count_in_the_answer_only_however_the_text_is_split(inside, rest, text, shown, stopped):
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], list(text)):
            got = run_matcher(AnswerStops(["\nUSER"], ["END"], OPEN, CLOSE, rest, inside), pieces)
            assert ("".join(got[0]), got[1]) == (shown, stopped), pieces


@pytest.mark.parametrize("thought", [">\n", ">\n<t>\na\n</t>\n\n"])
def test_a_line_feed_as_stop_ends_the_first_line_of_the_answer(thought):
    text = f"{thought}One.\nTwo."
    assert run_matcher(AnswerStops([], ["\n"], OPEN, CLOSE, ">", False), list(text))[1]
    got = run_matcher(AnswerStops([], ["\n"], OPEN, CLOSE, ">", False), [text])
    assert "".join(got[0]) == f"{thought}One."


def expected_in_answer(always, late, rest, inside, text):
    """By a search in the whole text."""
    tag = re.escape(rest)
    opening = "" if inside else rf"\s*{OPEN}"
    if begun := re.match(f"(?:{tag})?{opening}", text):
        closed = re.compile(rf"{CLOSE}\n*").search(text, begun.end())
        answer = closed.end() if closed else len(text)
    else:
        lead = re.match(rf"(?:{tag})?\n*", text) if rest else None
        answer = lead.end() if lead else 0
    found = [at for stop in always if (at := text.find(stop)) >= 0]
    found += [at for stop in late if (at := text.find(stop, answer)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


@settings(max_examples=2000, deadline=None)
@given(
    st.lists(st.sampled_from(["ab", "\nb", "</", ">a"]), max_size=2),
    st.lists(st.sampled_from(["a", "t", "<t>", " b", ">", "\n", "\na"]), min_size=1, max_size=2),
    st.sampled_from(["", ">"]),
    st.booleans(),
    st.lists(st.sampled_from(["a", "b", " ", "\n", "<", "<t>", "</t>", "</", "t>", ">"]), max_size=8),
)
def test_late_stops_do_what_a_search_in_the_whole_text_does(always, late, rest, inside, pieces):
    shown, stopped = run_matcher(AnswerStops(always, late, OPEN, CLOSE, rest, inside), pieces)
    assert ("".join(shown), stopped) == expected_in_answer(always, late, rest, inside, "".join(pieces))
