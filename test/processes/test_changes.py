"""Changes of models and adapters: which an engine makes that is started later, and whose turn it is."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_batch.processes.changes import ChangeQueue, compacted
from rwkv_batch.wire.codec import decode_to_engine, encode
from rwkv_batch.wire.commands import LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
from rwkv_batch.wire.supervision import ChangeGranted, EngineInfo, Serving

Change = LoadModel | RemoveModel | LoadAdapter | RemoveAdapter
MODELS, ADAPTERS, PATHS = "abcd", "xy", st.sampled_from("123")
change = st.one_of(
    st.builds(LoadModel, st.just("i"), path=PATHS, name=st.sampled_from(MODELS)),
    st.builds(RemoveModel, st.just("i"), st.sampled_from(MODELS)),
    st.builds(LoadAdapter, st.just("i"), st.sampled_from(ADAPTERS), PATHS, to_model=st.sampled_from(MODELS)),
    st.builds(RemoveAdapter, st.just("i"), st.sampled_from(ADAPTERS), to_model=st.sampled_from(MODELS)),
)


class Models:
    """What an engine serves, in its order, the default first: name -> path, and adapters with theirs."""

    def __init__(self, names: str) -> None:
        self.served = {name: ("0", dict[str, str]()) for name in names}

    def make(self, change: Change) -> bool:
        """Whether it can be made."""
        match change:
            case LoadModel(name=name, path=path):
                self.served[name] = path, {}  # in the place of the one before
            case RemoveModel(name=name):
                if name not in self.served or len(self.served) == 1:
                    return False
                del self.served[name]
            case LoadAdapter(to_model=model, key=key, path=path):
                if model not in self.served or key in self.served[model][1]:
                    return False
                self.served[model][1][key] = path
            case RemoveAdapter(to_model=model, key=key):
                return model in self.served and self.served[model][1].pop(key, None) is not None
        return True


@settings(deadline=None)
@given(st.sampled_from(["a", "ab", "abc"]), st.lists(change, max_size=25))
def test_an_engine_that_is_started_later_has_what_the_others_have(start: str, changes: Sequence[Change]):
    served, kept = Models(start), list[bytes]()
    for each in changes:
        if served.make(each):
            kept = compacted(kept, encode(each))
    later = Models(start)
    for encoded in kept:
        found = decode_to_engine(encoded)
        assert isinstance(found, Change)
        later.make(found)
    assert [*later.served.items()] == [*served.served.items()]
    assert len(kept) <= 2 * len(MODELS) + len(MODELS) * len(ADAPTERS), "what is void is not kept"


class FrontendPipe:
    """A front end, as the supervisor sees it."""

    def __init__(self) -> None:
        self.granted: list[ChangeGranted] = []

    def send(self, message: object) -> None:
        assert isinstance(message, ChangeGranted)
        self.granted.append(message)


LOAD, ADAPTER = encode(LoadModel("i", "1", "a")), encode(LoadAdapter("i", "x", "1", to_model="a"))


class Frontends:
    """Three front ends, of which some are lost, and the queue of their changes."""

    def __init__(self) -> None:
        self.living = [FrontendPipe(), FrontendPipe(), FrontendPipe()]
        self.models = ["m"]
        self.changes = ChangeQueue(self.living, lambda: [Serving([info(name) for name in self.models])])

    def lose(self, frontend: FrontendPipe) -> None:
        self.living.remove(frontend)
        self.changes.lost(frontend)


def info(name: str) -> EngineInfo:
    return EngineInfo(name, 1, 64, 1, "float32", "cpu", 4, 65536, "f", "m")


def test_one_change_is_made_at_a_time_in_the_order_of_asking():
    frontends = Frontends()
    changes, (one, two, three) = frontends.changes, frontends.living
    for each in (one, two, three):
        changes.wanted(each, LOAD)
    assert (one.granted, two.granted, three.granted) == ([ChangeGranted()], [], []) and changes.under_way
    assert changes.over(one, made=True) == LOAD
    changes.grant()
    assert (two.granted, three.granted, changes.made) == ([ChangeGranted()], [], [LOAD])
    assert changes.over(one, made=True) is None  # which has had its turn
    frontends.lose(three)  # which had none
    assert changes.over(two, made=False) is None
    changes.grant()
    assert not changes.under_way and three.granted == [] and changes.made == [LOAD]


@pytest.mark.parametrize("made", [False, True])
def test_what_a_front_end_was_changing_when_it_died_is_finished_by_another(made: bool):
    """Nobody knows which engines have made it: that one sees that all have, or none."""
    frontends = Frontends()
    changes, (one, two, three) = frontends.changes, [*frontends.living]
    changes.wanted(one, LOAD)
    frontends.models = ["m", "a"]  # one of the engines has made it
    changes.wanted(three, ADAPTER)
    frontends.lose(one)
    left = ChangeGranted(LOAD, ["m"])
    assert two.granted == [left] and three.granted == [] and changes.under_way
    frontends.lose(two)  # in the middle
    assert three.granted == [left] and changes.made == []
    assert changes.over(three, made) == (LOAD if made else None)
    changes.grant()
    assert three.granted == [left, ChangeGranted()] and changes.made == [LOAD] * made


def test_where_no_front_end_is_left_the_next_one_finishes_the_change():
    frontends = Frontends()
    changes, (one, *others) = frontends.changes, [*frontends.living]
    changes.wanted(one, LOAD)
    for each in (*others, one):
        frontends.lose(each)
    assert changes.under_way, "no engine may begin to serve before that"
    new = FrontendPipe()
    frontends.living.append(new)
    changes.grant()
    assert new.granted == [ChangeGranted(LOAD, ["m"])]
    changes.grant()
    assert len(new.granted) == 1 and changes.over(new, made=True) == LOAD


def test_an_adapter_whose_name_was_taken_has_not_been_loaded():
    """As all engines refuse it, though they have one of that name."""
    frontends = Frontends()
    changes, (one, two, _) = frontends.changes, [*frontends.living]
    for path in "12":
        changes.wanted(one, encode(LoadAdapter("i", "x", path, to_model="a")))
    changes.over(one, made=True)
    changes.grant()
    frontends.lose(one)
    assert not changes.under_way and two.granted == [] and len(changes.made) == 1
