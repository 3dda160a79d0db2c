"""What the GPU's kernels are given, looked at without one: the weights as they are laid out, and the ways to
run GEMMs.
"""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.gemms import autotune, calls
from rwkv_batch.model.cuda.gemms.autotune import Autotuner, usable
from rwkv_batch.model.cuda.gemms.gemms import Gemms
from rwkv_batch.model.cuda.gemms.kinds import KINDS
from rwkv_batch.model.cuda.packed.weights import pack_weights
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS
from rwkv_batch.ops.cuda.special import blaslt
from rwkv_batch.ops.cuda.special.row import rows_beside_head

CPU = torch.device("cpu")
WIDTH = 64


def mixed_ranks():
    """Two layers; the ranks of the first are larger, and neither are multiples of 32."""
    first, second = ({"w": 72, "a": 33, "v": 1, "g": 100}, {"w": 8, "a": 24, "v": 17, "g": 40})
    tensors = random_checkpoint(2, WIDTH, 300, ranks=first)
    last = random_checkpoint(2, WIDTH, 300, seed=1, ranks=second)
    return from_tensors(
        "mixed", tensors | {name: tensor for name, tensor in last.items() if name.startswith("blocks.1.")}
    )


def gemms(has_lowrank=False, has_tile=False, lt=None, fits_row=False):
    kernels = SimpleNamespace(
        has_lowrank=has_lowrank,
        has_tile=has_tile,
        overlaps=has_tile,
        invariant=False,
        sparse_fits=lambda rows, k: rows in SPARSE_ROWS,
        relu_square=lambda h: h.relu_().square_(),
    )
    return Gemms(kernels, pack_weights(tiny(width=WIDTH, vocab=300), CPU), lt, fits_row)


class OneAlgorithm:
    """cuBLASLt with a single proposal for every shape, on a CPU."""

    def algorithm_count(self, shape):
        return 1

    def run(self, w, x, y, algorithm, transposed=False):
        assert algorithm == 0
        splits = len(y) if y.dim() > x.dim() else 1
        for part, some_x, some_w in zip(
            y if splits > 1 else [y],
            x.chunk(splits, -1),
            w.chunk(splits, 0 if transposed else -1),
            strict=True,
        ):
            part.copy_(some_x @ (some_w if transposed else some_w.mT))


class Refuses:
    """The library, with no algorithm for any shape."""

    def __getattr__(self, name):
        return lambda *_: 15 if name == "cublasLtMatmulAlgoGetHeuristic" else 0


class TestRanks:
    def test_layers_of_different_ranks_fit_the_buffers_they_share(self):
        weights = pack_weights(mixed_ranks(), CPU)
        buffers = Buffers(weights.buffer_shape, 3, {})
        for layer in weights.layers:
            for name, w in layer.low_in.items():
                assert buffers.low[name].shape == (3, len(w))
                assert layer.low_out[name].shape == (WIDTH, len(w))

    @pytest.mark.parametrize("name", ["w", "a", "v", "g"])
    def test_what_is_filled_up_changes_no_result(self, name):
        checkpoint = mixed_ranks()
        layer = pack_weights(checkpoint, CPU).layers[1]
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        inner, outer = (checkpoint.tensors[f"blocks.1.att.{name}{i}"].half().double() for i in (1, 2))
        got = (x @ layer.low_in[name].double().T).sigmoid() @ layer.low_out[name].double().T
        torch.testing.assert_close(got, (x @ inner).sigmoid() @ outer)


class TestTuningFile:
    def test_choices_that_can_be_run_are_kept(self):
        chosen = {"in 1": "stream16", "value 8": "sparse", "head 1024": "blas"}
        assert usable(chosen, gemms()) == chosen

    @pytest.mark.parametrize(
        "entry",
        [
            {"value 16": "sparse"},
            {"value 0": "sparse"},
            {"in 0": "blas"},
            {"in": "blas"},
            {"in x": "blas"},
            {"else 1": "blas"},
            {"in 1": "other"},
            {"in 1": ["blas"]},
            {"in 1": None},
            {"key 64": "tile"},
            {"low_out 64": "low"},
            {"key 64": "lt0"},
        ],
    )
    def test_others_are_left_out(self, entry):
        assert usable(entry | {"out 2": "blas"}, gemms()) == {"out 2": "blas"}

    def test_algorithms_of_a_library_are_for_many_rows_and_as_many_as_there_are(self):
        gemms_by_lt = gemms(lt=OneAlgorithm())
        chosen = {"in 64": "lt0", "key 64": "lt0", "value 128": "lt0"}
        assert usable(chosen | {"out 63": "lt0", "out 64": "lt1", "low_out 64": "lt0"}, gemms_by_lt) == chosen

    def test_split_k_is_for_long_k_and_some_rows(self):
        gemms_by_lt = gemms(lt=OneAlgorithm())
        chosen = {
            "value_split 64": "lt0/4",
            "value_split 512": "lt0/2",
            "value_split 960": "whole",
            "out_split 64": "whole",
        }
        others = {
            "value_split 63": "lt0/2",
            "value_split 513": "lt0/2",
            "value_split 128": "lt1/2",
            "out_split 128": "lt0/2",
        }
        assert (
            usable(chosen | others, gemms_by_lt) == chosen and gemms_by_lt.untimed("value_split") == "whole"
        )
        assert usable(chosen, gemms()) == {key: method for key, method in chosen.items() if method == "whole"}

    def test_split_k_by_own_tiles_is_for_k_that_can_be_divided_and_some_rows(self):
        on_hopper, chosen = gemms(has_tile=True), {"value_split 65": "many/2", "value_split 512": "many/4"}
        others = {"value_split 64": "many/2", "value_split 513": "many/4", "out_split 128": "many/2"}
        assert usable(chosen | others, on_hopper) == chosen and usable(chosen, gemms()) == {}

    def test_shapes_that_a_library_refuses_have_no_algorithms(self):
        lt = blaslt.BlasLt(blaslt.CUBLASLT, Refuses(), CPU)
        assert usable({"value_split 64": "lt0/4", "key 64": "lt0"}, gemms(lt=lt)) == {}

    @pytest.mark.parametrize("content", [[], None, 3, "in 1"])
    def test_a_file_of_something_else_is_an_empty_one(self, content):
        assert usable(content, gemms()) == {}

    def test_kernels_of_few_rows_may_start_early_where_launches_overlap(self):
        for kind in ("in_start", "key_start"):
            assert gemms(has_tile=True).candidates(kind, 64) == ("late", "early")
            assert gemms(has_tile=True).candidates(kind, 65) == gemms().candidates(kind, 1) == ("late",)

    def test_layers_of_one_row_may_run_together_where_a_kernel_fits_them(self):
        one = gemms(has_tile=True, fits_row=True)
        assert one.candidates("layers", 1) == ("separate", "together")
        assert one.candidates("layers", 2) == gemms(has_tile=True).candidates("layers", 1) == ("separate",)

    def test_tiles_are_for_weights_that_fill_them(self):
        on_hopper = gemms(has_lowrank=True, has_tile=True)
        assert "tile" not in on_hopper.candidates("head", 64)  # 304 rows are no multiple of 64
        assert {kind for kind in KINDS if "tile" in on_hopper.candidates(kind, 64)} == {
            "in",
            "out",
            "key",
            "value",
        }
        assert "many" not in on_hopper.candidates("key", 256) and "many" in on_hopper.candidates("key", 257)
        assert "beside" not in on_hopper.candidates("in", 64) and "beside" in on_hopper.candidates("in", 65)


@pytest.mark.parametrize(("ranks", "heads", "rows"), [(832, 64, 6), (576, 40, 1), (288, 16, 1)])
def test_inner_sides_are_divided_so_that_no_block_has_none(ranks, heads, rows):
    blocks = 132
    assert rows_beside_head(ranks, heads, blocks) == rows
    others = ranks - 2 * heads * rows
    assert blocks - 2 * heads <= others <= 24 * (blocks - 2 * heads)


class Watched(Gemms):
    """Whose methods do nothing but note what is timed."""

    def call(self, kind, layer, b):
        return SimpleNamespace(kind=kind, b=b)

    def find(self, kind, name):
        return SimpleNamespace(run=lambda call: SEEN.append((call.kind, name, active_share(call.b))))


def active_share(b):
    return float((b.hidden > 0).float().mean())


SEEN: list[tuple[str, str, float]] = []
MILLISECONDS = {"blas": 2.0, "low": 1.0, "tile": 3.0}  # of others 4


@pytest.fixture
def tuner(monkeypatch, tmp_path):
    """On a GPU where methods take MILLISECONDS. The graph of a GEMM says which method it is of."""
    SEEN.clear()
    monkeypatch.setattr(autotune, "capture", lambda run: SimpleNamespace(replay=run))
    monkeypatch.setattr(
        autotune,
        "gpu_seconds",
        lambda run: (run(), MILLISECONDS.get(SEEN[-1][1] if SEEN else "", 4.0) / 1000)[1],
    )
    whole = gemms(has_lowrank=True, has_tile=True)
    watched = Watched(whole.kernels, whole.weights, None)
    return Autotuner(watched, tmp_path / "tuning.json", lambda rows: lambda methods: None, {})


def test_gemms_are_timed_on_numbers_like_those_of_a_step(tuner, monkeypatch):
    """No matter what those that were timed before have left in the buffers."""
    find = Watched.find

    def overwriting(self, kind, name):
        run = find(self, kind, name).run
        after = (lambda call: call.b.hidden.fill_(1)) if kind == "key" else (lambda call: None)
        return SimpleNamespace(run=lambda call: (run(call), after(call)))

    monkeypatch.setattr(Watched, "find", overwriting)
    tuner.measure([8], progress=False)
    shares = {method: share for kind, method, share in SEEN if kind == "value"}
    assert set(shares) == {"sparse", "tile", "blas"} and all(0.05 < share < 0.15 for share in shares.values())


class TestChoicesByAndBy:
    def test_before_anything_is_timed_all_kinds_have_a_method_that_can_be_run(self, tuner):
        for tokens in (1, 2, 3, 8, 16, 17, 64, 256, 257, 1024, 1025, 4000, 1 << 30):
            for kind, method in tuner.methods(tokens).items():
                assert method in tuner.gemms.candidates(kind, min(tokens, 4096))
        assert not SEEN

    def test_what_is_the_fastest_for_a_similar_size_is_the_guess(self, tuner):
        tuner.chosen |= {"out 128": "stream32", "key 16": "stream32", "value 8": "sparse"}
        methods = [tuner.methods(tokens) for tokens in (130, 192, 200, 24, 9)]
        assert [each["out"] for each in methods] == ["stream32", "stream32", "tile", "tile", "stream16"]
        assert methods[3]["key"] == "stream32" and methods[4]["value"] == "tile"

    def test_a_size_is_timed_in_pieces_and_its_choice_is_kept(self, tuner):
        pieces = sum(1 for _ in tuner.measuring(64))
        alone = len({(kind, method) for kind, method, _ in SEEN})
        together = 4  # of two kinds with two methods each
        assert pieces == alone * (1 + 1 + autotune.RUNS) + together * (1 + 1 + autotune.ROUNDS)
        assert tuner.methods(64) == {
            **{kind: "low" for kind in ("in", "low_out")},
            **{kind: "blas" for kind in ("out", "key", "value", "head")},
            **{kind: "whole" for kind in ("out_split", "value_split")},
            **{kind: "late" for kind in ("in_start", "key_start")},  # of those that take as long the first
            "layers": "separate",
        }
        again = Autotuner(tuner.gemms, tuner.file, tuner.step, autotune.kept_in(tuner.file, tuner.gemms))
        assert again.methods(64) == tuner.methods(64) and again.unmeasured([64, 65]) == [65]

    def test_a_clock_that_falls_meanwhile_decides_nothing(self, tuner, monkeypatch):
        """Every run takes a tenth longer than the one before."""
        real, runs = autotune.gpu_seconds, count()
        monkeypatch.setattr(autotune, "gpu_seconds", lambda run: real(run) * 1.1 ** next(runs))
        tuner.measure([64], progress=False)
        assert {tuner.methods(64)[kind] for kind in ("out", "key", "value", "head")} == {"blas"}
        assert {tuner.methods(64)[kind] for kind in ("in", "low_out")} == {"low"}

    def test_an_early_start_is_timed_between_the_neighbours_alone(self, tuner, monkeypatch):
        def step(rows):
            return lambda methods: SEEN.append(("layers", methods["key_start"], 0.0))

        monkeypatch.setitem(MILLISECONDS, "late", 2.0)
        monkeypatch.setitem(MILLISECONDS, "early", 1.0)
        tuner.step = step
        tuner.measure([64], progress=False)
        chosen = tuner.methods(64)
        assert chosen["key_start"] == "early" and not {kind for kind, *_ in SEEN} & {"in_start", "key_start"}

    def test_a_head_that_is_faster_behind_the_layers_is_found(self, tuner, monkeypatch):
        """Among those that are not much slower alone."""
        monkeypatch.setitem(MILLISECONDS, "stream16", 2.1)
        tuner.step = lambda rows: lambda methods: SEEN.append(("", f"head {methods['head']}", 0.0))
        monkeypatch.setitem(MILLISECONDS, "head blas", 1.1)
        monkeypatch.setitem(MILLISECONDS, "head stream16", 1.0)
        tuner.measure([64], progress=False)
        assert tuner.methods(64)["head"] == "stream16" and tuner.methods(64)["out"] == "blas"

    def test_methods_that_are_faster_together_alone_are_found(self, tuner, monkeypatch):
        def step(rows):
            return lambda methods: SEEN.append(("", f"{methods['in_start']} {methods['key_start']}", 0.0))

        monkeypatch.setitem(MILLISECONDS, "late late", 2.0)
        monkeypatch.setitem(MILLISECONDS, "early early", 1.0)
        tuner.step = step
        tuner.measure([64], progress=False)
        assert [tuner.methods(64)[kind] for kind in ("in_start", "key_start")] == ["early", "early"]

    @pytest.mark.parametrize("last", ["low_out alone", "a comparison"])
    def test_what_was_found_out_before_it_was_given_up_is_not_timed_again(self, tuner, last):
        def step(rows):
            return lambda methods: SEEN.append(("step", methods["key_start"], 0.0))

        tuner.step = step
        guessed, pieces = tuner.methods(64), tuner.measuring(64)
        while {"low_out alone": "low_out", "a comparison": "step"}[last] not in {kind for kind, *_ in SEEN}:
            next(pieces)
        pieces.close()
        assert tuner.methods(64) == guessed  # until all kinds are known
        before, SEEN[:] = {kind for kind, _, _ in SEEN}, []
        for _ in tuner.measuring(64):
            pass
        assert "in" in before and "in" not in {kind for kind, _, _ in SEEN}
        assert not tuner.unmeasured([64])

    def test_comparisons_that_were_over_are_not_made_again(self, tuner, monkeypatch):
        monkeypatch.setitem(MILLISECONDS, "stream16", 2.1)
        compared = []
        tuner.step = lambda rows: lambda methods: compared.append((methods["out"], methods["key"]))
        pieces = tuner.measuring(64)
        while ("blas", "stream16") not in compared:  # which comes after all of "out"
            next(pieces)
        pieces.close()
        compared.clear()
        for _ in tuner.measuring(64):
            pass
        assert compared[0] == ("blas", "blas")

    def test_a_file_without_one_of_the_kinds_is_not_enough(self, tuner):
        """Of a version that had fewer: all are chosen again, together."""
        tuner.chosen |= {f"{kind} 64": "tile" for kind in ("out", "key", "value", "head")}
        assert tuner.unmeasured([64]) == [64]
        tuner.measure([64], progress=False)
        assert {tuner.methods(64)[kind] for kind in ("out", "key", "value", "head")} == {"blas"}

    def test_a_slow_run_among_fast_ones_decides_nothing(self, tuner, monkeypatch):
        """The first of each, as after a start, and later ones, as while another program has the GPU."""
        real, runs = autotune.gpu_seconds, count()
        monkeypatch.setattr(
            autotune, "gpu_seconds", lambda run: real(run) * (10 if next(runs) % 11 == 0 else 1)
        )
        tuner.measure([64], progress=False)
        assert {tuner.methods(64)[kind] for kind in ("out", "key", "value", "head")} == {"blas"}

    def test_what_another_server_has_written_meanwhile_stays(self, tuner):
        tuner.file.write_text('{"out 3": "blas", "out 64": "tile", "else": 1}')
        tuner.measure([64], progress=False)
        kept = autotune.kept_in(tuner.file, tuner.gemms)
        assert kept["out 3"] == "blas" and kept["out 64"] == "blas"


@pytest.mark.parametrize("method", ["blas", "lt0"])
def test_gemms_by_a_library_are_those_of_the_weights(method):
    by_library, rows = gemms(lt=OneAlgorithm()), 5
    layer, head = by_library.weights.layers[-1], by_library.weights.head
    b = Buffers(by_library.weights.buffer_shape, rows, {})
    for tensor in (b.mixed, b.y, b.normed):
        tensor.normal_()
    logits = torch.empty(rows, len(head), dtype=torch.float16)

    def run(kind, name=method):
        return by_library.find(kind, name).run(by_library.call(kind, layer, b))

    def close(got, want):
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)

    run("in")
    close(b.rkv, b.mixed[:3].float() @ layer.rkv.float().mT)
    run("key")
    hidden = b.hidden.clone()
    close(hidden, (b.mixed[0].float() @ layer.key.float().T).relu().square())
    by_library.find("head", method).run(calls.head(head, b.normed, logits))
    close(logits, b.normed.float() @ head.float().T)
    for kind, want in (
        ("out", b.y.float() @ layer.output.float().T),
        ("value", hidden.float() @ layer.value.float()),
    ):
        assert run(kind) is None  # no partial sums
        close(b.out, want)
        for split in ("lt0/2", "lt0/4") if method == "lt0" else ():
            close(run(kind, split).sum(0), want)
