"""How a step is divided into groups that pass through the stages of a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_batch.runner import groups
from rwkv_batch.runner.groups import Groups, Piece
from rwkv_batch.runner.protocol import LAST, Batch
from rwkv_batch.sampling.mixtures import MixedRows
from rwkv_batch.sampling.prompt_logprobs import ScoredRow


def step(counts: dict[int, int], **fields) -> Batch:
    """counts: of the tokens of each slot."""
    tokens = [LAST] * sum(counts.values())
    return Batch(tokens, list(counts.values()), list(counts), list(range(len(counts))), **fields)


def decoding(slots) -> Batch:
    return step(dict.fromkeys(slots, 1))


def slots_of(batch: Batch, divided: list[list[Piece]]) -> list[set[int]]:
    return [{batch.slots[piece.row] for piece in group} for group in divided]


def test_few_rows_are_one_group():
    batch = decoding(range(groups.FEWEST_ROWS * 2 - 1))
    assert Groups(4).divide(batch) == [[Piece(row, 0, 1) for row in range(len(batch.slots))]]
    assert len(Groups(4).divide(decoding(range(groups.FEWEST_ROWS * 3)))) == 3


def test_a_row_stays_in_its_group_while_others_come_and_go():
    divided, slots = Groups(2), list(range(100))
    before = slots_of(decoding(slots), divided.divide(decoding(slots)))
    assert [len(group) for group in before] == [50, 50]
    slots = [*range(200, 204), *slots[3:]]  # in other places too
    after = slots_of(decoding(slots), divided.divide(decoding(slots)))
    assert all(group & {*slots} <= now for group, now in zip(before, after, strict=True))


def test_groups_that_have_become_unequal_are_made_equal_again():
    divided = Groups(2)
    first, _ = slots_of(batch := decoding(range(100)), divided.divide(batch))
    left = decoding(sorted({*range(100)} - {*sorted(first)[:30]}))
    assert [len(group) for group in divided.divide(left)] == [35, 35]


@pytest.mark.parametrize(
    "together", [{"mixtures": [MixedRows([0, 90], [0.5, 0.5])]}, {"scored": {0: ScoredRow(0, [1], 1)}}]
)
def test_rows_that_belong_together_are_not_divided(together):
    assert len(Groups(2).divide(step(dict.fromkeys(range(100), 1), **together))) == 1


def test_a_long_prompt_passes_in_chunks_beside_rows_that_decode():
    batch = step({**dict.fromkeys(range(64), 1), 70: 4000})
    divided = Groups(2).divide(batch)
    pieces = [piece for group in divided for piece in group if piece.row == 64]
    assert len(pieces) == 2 and all(piece.count % groups.CUT == 0 for piece in pieces[:-1])
    sizes = [sum(piece.count for piece in group) for group in divided]
    assert max(sizes) - min(sizes) <= 2 * groups.CUT and sum(sizes) == 4064


@pytest.mark.parametrize("length", [40, 200, 4000])
def test_a_row_that_has_begun_goes_on_in_the_group_where_it_drew(length):
    divided, others = Groups(4), dict.fromkeys(range(128), 1)
    began = slots_of(batch := step({**others, 200: length}), divided.divide(batch))
    goes_on = slots_of(batch := decoding([*others, 200]), divided.divide(batch))
    drew = max(place for place, group in enumerate(began) if 200 in group)
    assert [200 in group for group in goes_on] == [place == drew for place in range(4)]


def test_short_prompts_are_divided_evenly():
    batch = step({**dict.fromkeys(range(64), 1), **dict.fromkeys(range(100, 140), 20)})
    sizes = [sum(piece.count for piece in group) for group in Groups(4).divide(batch)]
    assert max(sizes) - min(sizes) <= 20 and sum(sizes) == 64 + 40 * 20


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 200), st.sampled_from([1, 1, 1, 2, 70, 700, 3000]), min_size=1, max_size=90
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_every_token_is_in_one_group_and_those_of_a_row_are_in_order(steps, most):
    divided = Groups(most)
    for counts in steps:
        found = divided.divide(batch := step(counts))
        assert 1 <= len(found) <= most and all(found)
        ends = [0] * len(batch.slots)
        for group in found:
            assert [piece.row for piece in group] == sorted({piece.row for piece in group})
            for piece in group:
                assert piece.first == ends[piece.row] and piece.count > 0
                ends[piece.row] += piece.count
        assert ends == batch.counts
