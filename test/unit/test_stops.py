"""Stop strings found in text that comes in pieces, against a search in the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_batch.text.stops import StopStrings


def run(stops, pieces):
    """The shown pieces, and whether the text was stopped."""
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown.append(text)
        if stopped:
            assert matcher.stopped
            return shown, True
    shown.append(matcher.finish())
    return shown, matcher.stopped


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
    shown, stopped = run(stops, pieces)
    assert ("".join(shown), stopped) == expected(stops, "".join(pieces))


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
