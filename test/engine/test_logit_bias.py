"""logit_bias by the vocabulary of the model: every id counts, or is refused."""

import pytest
from checkpoints import tiny
from models_driver import OPTIONS, PROMPT

from rwkv_batch.engine.engine import Engine
from rwkv_batch.wire.protocol import GenerateRequest, Rejected, RowDelta, Sampling

KEY = b"test", "r"


@pytest.fixture(scope="module", params=[(400, 400), (65536, 65530)], ids=["small", "padded"])
def case(request):
    """An engine, and how many ids its model has. A head of 65,536 rows has 65,530 with a text."""
    rows, ids = request.param
    engine = Engine(tiny(vocab=rows), **OPTIONS)
    yield engine, ids
    engine.close()


def events_of(engine: Engine, bias: dict[int, float]) -> list:
    sampling = Sampling(temperature=0.0, logit_bias=bias)
    request = GenerateRequest(
        id=KEY[1], prompts=[PROMPT], max_tokens=1, sampling=sampling, stop_ids=[], return_ids=True
    )
    engine.add(KEY, request)
    found = [event for _, event in engine.step()]
    while engine.busy:
        found += [event for _, event in engine.step()]
    return found


def test_every_id_counts(case):
    engine, ids = case
    for token in (0, 1, ids // 2, ids - 1):
        deltas = [e for event in events_of(engine, {token: 1000.0}) for e in getattr(event, "rows", [])]
        assert [token] == [each for delta in deltas if isinstance(delta, RowDelta) for each in delta.ids]


@pytest.mark.parametrize("beyond", [0, 1, 5, 6, 10**6])
def test_an_id_that_is_never_drawn_is_refused_by_its_number(case, beyond):
    engine, ids = case
    (event,) = events_of(engine, {1: 1.0, ids + beyond: 1.0})
    assert isinstance(event, Rejected) and event.reason == "invalid"
    assert f"token {ids + beyond}" in event.message and f"0 to {ids - 1}" in event.message
