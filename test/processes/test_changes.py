"""Changes of models and adapters: which an engine makes that is started later, and whose turn it is."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rwkv_batch.processes.changes import ChangeQueue
from rwkv_batch.wire.codec import compacted, decode_to_engine, encode
from rwkv_batch.wire.commands import LoadAdapter, LoadModel, RemoveAdapter, RemoveModel
from rwkv_batch.wire.supervision import ChangeGranted

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
        self.granted = 0

    def send(self, message: object) -> None:
        assert message == ChangeGranted()
        self.granted += 1


def test_one_change_is_made_at_a_time_in_the_order_of_asking():
    changes, one, two, three = ChangeQueue(), FrontendPipe(), FrontendPipe(), FrontendPipe()
    load = encode(LoadModel("i", "1", "a"))
    for each in (one, two, three):
        changes.wanted(each, load)
    assert (one.granted, two.granted, three.granted) == (1, 0, 0) and changes.under_way
    assert changes.over(one, made=True) == load
    changes.grant()
    assert (two.granted, three.granted, changes.made) == (1, 0, [load])
    assert changes.over(one, made=True) is None  # which has had its turn
    assert changes.lost(three) is None  # which had none
    assert changes.over(two, made=False) is None
    changes.grant()
    assert not changes.under_way and three.granted == 0 and changes.made == [load]


def test_what_a_front_end_was_changing_when_it_died_is_made_by_those_that_start_later():
    """Engines carry out what they have been sent, though nobody waits for the answer."""
    changes, one, two = ChangeQueue(), FrontendPipe(), FrontendPipe()
    load, adapter = encode(LoadModel("i", "1", "a")), encode(LoadAdapter("i", "x", "1", to_model="a"))
    changes.wanted(one, load)
    changes.wanted(two, adapter)
    assert changes.lost(one) == load
    changes.grant()
    assert two.granted == 1 and changes.lost(two) == adapter
    assert changes.made == [load, adapter] and not changes.under_way
