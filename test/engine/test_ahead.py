"""An engine that queues a step before it knows the draws of the one before says what one says that waits for
each.
"""

import pytest
from ahead import LateRunner, plain_and

from rwkv_batch.engine.engine import Engine
from rwkv_batch.wire.commands import DeleteSession
from rwkv_batch.wire.protocol import Failed, GenerateRequest, Progress, RowDelta, Sampling, SessionTurn

pytestmark = pytest.mark.thorough

TRANSLATE = "English: Good morning!\n\nChinese:"
CAPITAL = "User: What is the capital of France?\n\nAssistant:"
PROMPTS = [TRANSLATE, CAPITAL, "User: hello\n\nAssistant:", "one two three", ""]
END = 0
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """One that waits, and one that does not."""
    return plain_and(LateRunner, max_rows=4)


def answers(engine: Engine, request: GenerateRequest) -> dict[int, list[RowDelta]]:
    """All that is said to the rows of a request."""
    engine.add((b"test", request.id), request)
    received: dict[int, list[RowDelta]] = {}
    while not all(
        row in received and received[row][-1].finish_reason for row in range(len(request.prompts) * request.n)
    ):
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.message
            if isinstance(event, Progress):
                for delta in event.rows:
                    received.setdefault(delta.row, []).append(delta)
    return received


@pytest.mark.parametrize(
    "options",
    [
        {"stop_ids": []},
        {"stop_ids": [END, 24281]},
        {"stop_ids": [END, *range(300, 320)]},  # too many to be known on the device
        {"stop_ids": [], "stop_strings": ["a", "。", "\n\n"]},
        {"stop_ids": [END], "max_tokens": 1},
        {"stop_ids": [END], "sampling": Sampling(temperature=1.5, seed=3, presence_penalty=1.0)},
        {"stop_ids": [END], "top_logprobs": 2, "flush_tokens": 1},
    ],
    ids=str,
)
def test_the_same_is_said(engines: tuple[Engine, Engine], options: dict):
    request = GenerateRequest(id="same", prompts=PROMPTS, **{"max_tokens": 20, "sampling": GREEDY, **options})
    plain, late = (answers(engine, request) for engine in engines)
    assert plain == late
    assert not engines[1].busy


def test_it_does_queue_steps_ahead(engines: tuple[Engine, Engine]):
    late = engines[1].runner
    assert isinstance(late, LateRunner)
    before = late.fed_last
    engines[1].generate(["hello"], max_tokens=10, stop_ids=[], sampling=GREEDY)
    assert late.fed_last - before == 9


@pytest.mark.parametrize(
    "options",
    [{"stop_ids": [END, 24281]}, {"stop_ids": [], "stop_strings": ["\n", "a"]}, {"stop_ids": []}],
    ids=str,
)
def test_turns_go_on_from_exactly_what_was_said(engines: tuple[Engine, Engine], options: dict):
    said = []
    for engine in engines:
        texts = []
        for number in range(4):
            turn = SessionTurn(source=f"s{options}", target=f"s{options}", separator="\n\n")
            request = GenerateRequest(
                id=f"turn {number}", prompts=[CAPITAL], max_tokens=9, turn=turn, sampling=GREEDY, **options
            )
            texts.append(answers(engine, request)[0])
        said.append(texts)
    assert said[0] == said[1]


def test_a_turn_from_another_session_ends_at_its_stop_string_though_that_session_is_deleted_meanwhile(
    engines: tuple[Engine, Engine],
):
    said = []
    for engine in engines:
        base = SessionTurn(source="base", target="base")
        answers(
            engine, GenerateRequest(id="base", prompts=[CAPITAL], max_tokens=5, turn=base, sampling=GREEDY)
        )
        turn = SessionTurn(source="base", target="other", required=True)
        first = GenerateRequest(
            id="first",
            prompts=[CAPITAL],
            max_tokens=20,
            turn=turn,
            stop_ids=[],
            stop_strings=["a", "i", "。"],
            sampling=GREEDY,
        )
        engine.add((b"test", "first"), first)
        received: list[RowDelta] = []
        deleted = False
        while not (received and received[-1].finish_reason):
            for _, event in engine.step():
                assert not isinstance(event, Failed), event.message
                if isinstance(event, Progress):
                    received += event.rows
            if not deleted and any(row.drawn or row.in_flight for row in engine.scheduler.running.values()):
                engine.command((b"test", "delete"), DeleteSession(id="delete", key="base"))
                deleted = True
        assert deleted and received[-1].finish_reason == "stop"
        after = GenerateRequest(
            id="after",
            prompts=[" and then"],
            max_tokens=6,
            turn=SessionTurn(source="other", target="other", required=True),
            stop_ids=[],
            sampling=GREEDY,
        )
        said.append(
            (
                "".join(delta.text for delta in received),
                "".join(delta.text for delta in answers(engine, after)[0]),
            )
        )
    assert said[0] == said[1]


def test_who_leaves_while_a_step_is_under_way_leaves_nothing_behind(engines: tuple[Engine, Engine]):
    late = engines[1]
    want = late.generate([CAPITAL], max_tokens=12, stop_ids=[], sampling=GREEDY)[0].text
    late.add(
        (b"test", "leaver"),
        GenerateRequest(id="leaver", prompts=PROMPTS[:4], max_tokens=1000, stop_ids=[], sampling=GREEDY),
    )
    for _ in range(5):
        late.step()
    late.cancel((b"test", "leaver"))
    assert not late.busy
    assert late.generate([CAPITAL] * 4, max_tokens=12, stop_ids=[], sampling=GREEDY)[3].text == want
