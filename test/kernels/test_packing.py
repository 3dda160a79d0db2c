"""The plan of packed rows."""

import pytest

from rwkv_batch.ops.cuda.abi import CHUNK
from rwkv_batch.ops.cuda.inputs.packing import SCRATCH_CHUNKS, PrefillPlan


@pytest.mark.parametrize(
    "lengths", [[1], [2], [5, 1, 16, 1, 17, 1], [1] * 7, [5000, 1, 4096, 32], [20 * CHUNK] * 40, [2] * 700]
)
def test_a_plan_covers_every_token_once(lengths):
    slots = [7 * row % 1009 for row in range(len(lengths))]
    plan = PrefillPlan.from_lengths(lengths, slots)
    assert (
        sorted(plan.order) == list(range(len(lengths)))
        and [lengths[row] for row in plan.order[: plan.single]] == [1] * plan.single
    )
    tokens_of = {row: [] for row in range(len(lengths))}
    for token, place in enumerate(plan.numbers["row_of"]):
        tokens_of[plan.order[place]].append(token)
    assert [len(tokens_of[row]) for row in tokens_of] == lengths and plan.tokens == sum(lengths)
    assert plan.numbers["last"] == [tokens_of[row][-1] for row in plan.order]
    assert plan.numbers["slots"] == [slots[row] for row in plan.order]
    chunk = row = 0
    for chunks, rows in plan.launches:
        assert rows == 1 or chunks <= SCRATCH_CHUNKS
        for i in range(row, row + rows):
            begin = chunk + plan.numbers["row_chunk"][i]
            here = range(begin, begin + plan.numbers["row_chunks"][i])
            covered = [
                token
                for c in here
                for token in range(
                    plan.numbers["chunk_token"][c],
                    plan.numbers["chunk_token"][c] + plan.numbers["chunk_tokens"][c],
                )
            ]
            of = slots.index(plan.numbers["row_slot"][i])
            assert (
                covered == tokens_of.pop(of)
                and len(covered) > 1
                and chunk <= begin
                and here.stop <= chunk + chunks
            )
        chunk, row = chunk + chunks, row + rows
    assert all(len(tokens) == 1 for tokens in tokens_of.values()) and len(tokens_of) == plan.single
    assert plan.numbers["counts"] == [
        plan.single,
        *(number for launch in plan.launches or [(0, 0)] for number in launch),
    ]
