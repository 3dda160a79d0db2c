"""Which engine gets a request: over arrivals, sessions, reports and deaths in any order."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from routes.responses.prepare import new_id, state_key
from rwkv_batch.wire.placing.homes import SPAN_SECONDS, SPANS, Homes, size_for
from rwkv_batch.wire.placing.placement import NoEngine, Placed, Placement
from rwkv_batch.wire.protocol import GenerateRequest, SessionTurn

MODEL = "rwkv"
SLOTS = 8
UNTIMED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def request(*prompts: str, n: int = 1, turn: SessionTurn | None = None) -> GenerateRequest:
    return GenerateRequest("x", list(prompts), 10, n=n, turn=turn, to_model=MODEL)


def turn_of(session: str) -> GenerateRequest:
    return request("hi", turn=SessionTurn(source=session, target=session))


def placement(engines: int, slots: int = SLOTS, homes: Homes | None = None) -> Placement:
    found = Placement(engines, homes)
    for engine in range(engines):
        found.serves(engine, {MODEL: slots})
    return found


class FrontEnds:
    """Front ends of one host, which begin at any time."""

    def __init__(self, engines: int, count: int = 0, slots: int = 64) -> None:
        self.engines, self.slots, self.now = engines, slots, 0.0
        self._memory = bytearray(size_for(engines))
        self.all = [self.begin() for _ in range(count)]

    def begin(self) -> Placement:
        return placement(self.engines, self.slots, Homes(self.engines, self._memory, clock=lambda: self.now))

    def lose(self, engine: int) -> None:
        for front in self.all:
            front.lost(engine)

    def engine_of(self, front: int, session: str) -> int:
        """Where a turn of it goes, which ends at once."""
        (share,) = self.all[front].place(turn_of(session))
        self.all[front].over(share.ticket)
        return share.engine


class Host(RuleBasedStateMachine):
    """Two front ends of one host, whose engines report at any time."""

    @initialize(engines=st.integers(2, 4))
    def begin(self, engines: int) -> None:
        self.host = FrontEnds(engines, 2, SLOTS)
        self.fronts = self.host.all
        self.noted = dict[str, int]()  # sessions with their engines
        self.alive = set(range(engines))
        self.live: list[tuple[int, Placed]] = []  # front end and share
        self.reported = [Counter[int]() for _ in self.fronts]  # rows of the other one, by engine

    def rows(self, engine: int, front: int | None = None) -> int:
        return sum(
            share.ticket.rows for of, share in self.live if share.engine == engine and front in (None, of)
        )

    def known(self, front: int, engine: int) -> int:
        return self.rows(engine, front) + self.reported[front][engine]

    @rule(
        front=st.integers(0, 1),
        prompts=st.lists(st.sampled_from(["a", "b" * 300, "c" * 5000]), min_size=1, max_size=40),
        n=st.sampled_from([1, 1, 2, 9]),
    )
    @precondition(lambda self: self.alive)
    def arrives(self, front: int, prompts: list[str], n: int) -> None:
        before = {engine: self.known(front, engine) for engine in self.alive}
        shares = self.fronts[front].place(request(*prompts, n=n))
        assert sorted(row for share in shares for row in share.rows) == list(range(len(prompts) * n))
        assert {share.engine for share in shares} <= self.alive
        for share in shares:
            assert sorted({row // n for row in share.rows}) == share.prompts
            assert len(share.rows) % len(share.prompts) == 0
        got = {share.engine: len(share.rows) for share in shares}
        after = {engine: before[engine] + got.get(engine, 0) for engine in self.alive}
        largest = max(n, len(prompts) if len(prompts) < 2 * len(self.alive) else 1)  # piece of it
        idle = [engine for engine in self.alive if after[engine] + largest <= SLOTS]
        if idle:
            assert not [e for e in got if after[e] > SLOTS and before[e] < after[e] - largest + 1], (
                "rows wait at one engine while another has room"
            )
        self.live += [(front, share) for share in shares]

    @rule(front=st.integers(0, 1), session=st.sampled_from(["s", "t", "u"]), node=st.integers(0, 3))
    @precondition(lambda self: self.alive)
    def turn(self, front: int, session: str, node: int) -> None:
        under_way = {
            share.engine
            for of, share in self.live
            if of == front and share.ticket.session == (MODEL, session)
        }
        (share,) = self.fronts[front].place(turn_of(f"{session}:{node}" if node else session))
        assert share.engine in self.alive
        if under_way:
            assert share.engine in under_way
        elif self.noted.setdefault(session, share.engine) in self.alive:
            assert share.engine == self.noted[session]
        assert share.engine == self.home(session) or under_way
        self.live.append((front, share))

    def home(self, session: str) -> int:
        """The home of a session by a front end that has just begun."""
        late = self.host.begin()
        for engine in range(self.host.engines):
            if engine not in self.alive:
                late.lost(engine)
        return late.home(MODEL, session)

    @rule(spans=st.integers(1, 2 * SPANS))
    def time_passes(self, spans: int) -> None:
        self.host.now += spans * SPAN_SECONDS

    @rule(at=st.integers(0, 1000))
    @precondition(lambda self: self.live)
    def ends(self, at: int) -> None:
        front, share = self.live.pop(at % len(self.live))
        self.fronts[front].read(share.ticket)
        self.fronts[front].over(share.ticket)
        self.fronts[front].over(share.ticket)

    @rule(engine=st.integers(0, 3))
    def reports(self, engine: int) -> None:
        if engine in self.alive:
            for number, front in enumerate(self.fronts):
                front.loads()  # it has heard of all that has ended
                front.reported(engine, self.rows(engine), 0)
                self.reported[number][engine] = self.rows(engine, 1 - number)

    @rule(engine=st.integers(0, 3))
    def dies(self, engine: int) -> None:
        if engine in self.alive:
            self.alive.remove(engine)
            self.live = [(front, share) for front, share in self.live if share.engine != engine]
            for number, front in enumerate(self.fronts):
                front.lost(engine)
                self.reported[number][engine] = 0

    @rule(engine=st.integers(0, 3))
    def comes_back(self, engine: int) -> None:
        if engine < len(self.fronts[0].loads()) and engine not in self.alive:
            self.alive.add(engine)
            for front in self.fronts:
                front.serves(engine, {MODEL: SLOTS})

    @invariant()
    def loads_are_what_is_known(self) -> None:
        for number, front in enumerate(getattr(self, "fronts", [])):
            for engine, load in enumerate(front.loads()):
                if engine in self.alive:
                    assert load >= self.known(number, engine) / SLOTS


Host.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHost = Host.TestCase


def test_single_requests_go_where_there_is_the_least_to_do():
    found = placement(3)
    shares = [found.place(request("hi"))[0] for _ in range(6)]
    assert Counter(share.engine for share in shares) == {0: 2, 1: 2, 2: 2}
    found.over(shares[4].ticket)
    assert found.place(request("hi"))[0].engine == shares[4].engine


def test_what_another_front_end_has_sent_counts_once_it_is_reported():
    found = placement(2)
    found.reported(0, rows=3, tokens=0)
    assert [found.place(request("hi"))[0].engine for _ in range(3)] == [1, 1, 1]
    found.reported(0, rows=0, tokens=640)
    assert found.place(request("hi"))[0].engine == 1, "prompts that are not read count too"


def test_a_prompt_goes_where_its_beginning_was_sent_unless_that_engine_is_much_busier():
    found, system = placement(2, slots=32), "You are a helpful assistant. " * 20

    def sent(count: int) -> set[int]:
        shares = [found.place(request(system + str(i)))[0] for i in range(count)]
        for share in shares:
            found.read(share.ticket)
        return {share.engine for share in shares}

    assert sent(1) == sent(2) == {0}
    assert found.place(request("hi"))[0].engine == 1
    assert sent(12) == {0, 1}


def test_the_rows_of_one_prompt_are_divided():
    shares = placement(3).place(request("hi", n=8))
    assert sorted(len(share.rows) for share in shares) == [2, 3, 3]
    assert all(share.prompts == [0] for share in shares)


def test_engines_with_more_slots_get_more_rows():
    found = Placement(2)
    found.serves(0, {MODEL: 30})
    found.serves(1, {MODEL: 10})
    assert [len(s.rows) for s in found.place(request(*"abcdefghijklmnopqrst"))] == [15, 5]


@UNTIMED
@given(st.text(min_size=1), st.integers(0, 9))
def test_nodes_of_a_tree_have_the_engine_of_its_root(session: str, node: int):
    found, root = placement(5), session.replace(":", "_") or "_"
    assert found.home(MODEL, root) == found.home(MODEL, f"{root}:{node}")


def test_responses_of_a_chat_have_one_engine_and_chats_have_several():
    found, homes = placement(5), set()
    for _ in range(20):
        chain = [new_id(None)]
        for _ in range(3):
            chain.append(new_id(chain[-1]))
        assert len({*chain}) == 4
        (home,) = {found.home(MODEL, state_key(each)) for each in chain}
        homes.add(home)
    assert len(homes) > 2


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[FrontEnds, list[int]]:
    """Engines and front ends, and at which of these sessions arrive, one after the other."""
    host = FrontEnds(draw(st.integers(2, 6)), draw(st.integers(1, 4)))
    fronts = st.integers(0, len(host.all) - 1)
    return host, draw(st.lists(fronts, min_size=1, max_size=host.slots))


@UNTIMED
@given(arrivals())
def test_new_sessions_at_once_come_out_even_to_one(given: tuple[FrontEnds, list[int]]):
    """No front end knows yet what the others have sent."""
    host, fronts = given
    engines = Counter(dict.fromkeys(range(host.engines), 0))
    for number, front in enumerate(fronts):
        (share,) = host.all[front].place(turn_of(f"session {number}"))
        engines[share.engine] += 1
    assert max(engines.values()) - min(engines.values()) <= 1


@UNTIMED
@given(arrivals(), st.data())
def test_later_turns_have_their_engine_at_any_front_end_and_at_any_time(
    given: tuple[FrontEnds, list[int]], data: st.DataObject
):
    host, fronts = given
    homes = [host.engine_of(front, f"session {number}") for number, front in enumerate(fronts)]
    host.all.append(host.begin())
    for _ in range(20):
        host.now += data.draw(st.floats(0, 1e6))
        number = data.draw(st.integers(0, len(homes) - 1))
        front = data.draw(st.integers(0, len(host.all) - 1))
        assert host.engine_of(front, f"session {number}") == homes[number]
        host.engine_of(front, f"another {host.now}")


@UNTIMED
@given(arrivals(), st.data())
def test_a_death_moves_only_the_sessions_of_the_dead_engine_until_it_is_back(
    given: tuple[FrontEnds, list[int]], data: st.DataObject
):
    host, fronts = given

    def homes() -> list[int]:
        found = [
            [host.engine_of(front, f"session {n}") for n in range(len(fronts))]
            for front in range(len(host.all))
        ]
        assert all(each == found[0] for each in found), "all front ends agree"
        return found[0]

    before = homes()
    dead = data.draw(st.integers(0, host.engines - 1))
    host.lose(dead)
    after = homes()
    assert [a for a, b in zip(after, before, strict=True) if b != dead] == [b for b in before if b != dead]
    assert dead not in after
    for front in host.all:
        front.serves(dead, {MODEL: host.slots})
    assert homes() == before


def test_the_first_turns_of_a_session_at_two_front_ends_go_to_one_engine():
    host = FrontEnds(3, 2)
    for number in range(50):
        assert host.engine_of(0, f"s{number}") == host.engine_of(1, f"s{number}")


def test_one_that_was_away_gets_the_new_sessions_until_it_has_as_many_as_are_used():
    host = FrontEnds(2, 2)
    host.lose(1)
    assert {host.engine_of(number % 2, f"early {number}") for number in range(10)} == {0}
    for front in host.all:
        front.serves(1, {MODEL: host.slots})
    host.now += (SPANS - 1) * SPAN_SECONDS
    for number in range(4):  # the others are not used any more
        host.engine_of(number % 2, f"early {number}")
    host.now += 2 * SPAN_SECONDS
    later = [host.engine_of(number % 2, f"late {number}") for number in range(10)]
    assert later[:4] == [1, 1, 1, 1] and Counter(later) == {0: 3, 1: 7}


@pytest.mark.parametrize(("slots", "most"), [(8, 64), (100, 100)])
def test_an_engine_that_has_far_more_to_do_gets_no_new_session(slots: int, most: int):
    host = FrontEnds(2, 1, slots)
    host.all[0].reported(0, rows=most + 1, tokens=0)
    assert [host.engine_of(0, f"s{number}") for number in range(4)] == [1, 1, 1, 1]
    host.all[0].reported(0, rows=most, tokens=0)
    assert host.engine_of(0, "one more") == 0


def test_engines_with_more_slots_get_more_sessions():
    found = Placement(2)
    found.serves(0, {MODEL: 30})
    found.serves(1, {MODEL: 10})
    homes = Counter(found.place(turn_of(f"session {number}"))[0].engine for number in range(20))
    assert homes == {0: 15, 1: 5}


def test_a_model_is_asked_for_where_it_is():
    found = placement(3)
    found.serves(1, {MODEL: SLOTS, "other": SLOTS})
    asked = GenerateRequest("x", ["a", "b", "c"], 10, to_model="other")
    assert [share.engine for share in found.place(asked)] == [1]


def test_without_an_engine_nothing_is_placed():
    found = placement(1)
    found.lost(0)
    with pytest.raises(NoEngine):
        found.place(request("hi"))
