"""What may come next in a text: where its last tokens stood before."""

from rwkv_batch.text.lookup import MOST_LOOKED_UP, Lookup


def drafted(lookup: Lookup, most: int = 4) -> list[int]:
    return lookup.draft(most, 0.0)[0]


def test_a_draft_is_what_stands_behind_the_last_two_tokens():
    lookup = Lookup([1, 2, 3, 4, 5, 6, 7, 8])
    assert drafted(lookup) == []
    lookup.follow([9, 3, 4])
    assert drafted(lookup) == [5, 6, 7, 8]
    lookup.follow([9, 3, 4, 5])
    assert drafted(lookup) == [6, 7, 8, 9]
    lookup.follow([9, 3, 4, 5, 30])
    assert drafted(lookup) == [7, 8, 9, 3], "one token of the copy is another one"
    lookup.follow([9, 3, 4, 5, 30, 31, 1, 2])
    assert drafted(lookup, 2) == [3, 4]


def test_what_repeats_itself_goes_on():
    lookup = Lookup([1, 2, 3])
    lookup.follow([7, 8, 9, 7, 8])
    assert drafted(lookup, 7) == [9, 7, 8, 9, 7, 8, 9]
    lookup.follow([7, 8, 9, 7, 8, 5, 5, 5])
    assert drafted(lookup, 3) == [5, 5, 5]


def test_an_expected_text_is_drafted_from_its_beginning_to_its_end():
    lookup = Lookup([1, 2], [21, 22, 23, 24])
    assert drafted(lookup) == [21, 22, 23, 24]
    lookup.follow([20])
    assert drafted(lookup) == [22, 23, 24], "the first token differs, as by a space"
    lookup.follow([20, 22, 23])
    assert drafted(lookup) == [24]
    lookup.follow([20, 22, 23, 24])
    assert drafted(lookup) == []


def test_an_expected_text_counts_as_far_as_a_prompt():
    text = [*range(MOST_LOOKED_UP + 2)]
    lookup = Lookup([], text)
    lookup.follow(text[:-4])
    assert drafted(lookup) == text[-4:-2]


def test_a_draft_is_as_long_as_its_places_have_been_right():
    right, wrong = Lookup([*range(100)]), Lookup([1, 2] * 100)
    right.follow([*range(5, 60)])
    assert len(right.draft(7, 0.5)[0]) == 7 and right.draft(7, 0.5)[1] > 6
    text = [token for i in range(40) for token in (1, 2, 1000 + i)]
    for end in range(1, len(text)):
        wrong.follow(text[:end])
    assert wrong.draft(7, 0.2) == ([], 0.0), "what was found has never come"
