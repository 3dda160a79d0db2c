"""How many rows fit is known before anything is allocated, and holds."""

import gc
import shutil
from collections.abc import Callable

import pytest
import torch
from checkpoints import tiny, write_pth
from cuda_gpu import needs_gpu, time_nothing

from bench.make_checkpoint import FAMILIES, random_checkpoint, random_rwkv6
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine import memory
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.packed.packing import fp8_copy_bytes
from rwkv_batch.model.cuda.packed.rwkv6_weights import pack_rwkv6
from rwkv_batch.model.cuda.packed.weights import pack_weights
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops import device
from rwkv_batch.ops.cuda.buffers import Buffers, Rwkv6Buffers, buffer_bytes
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner import limits
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.protocol import Accepted, GenerateRequest, Progress, Sampling

MIB = 1 << 20
CPU = torch.device("cpu")
PLAIN = {"l1": 0, "prefix_cache_mb": 0}  # nothing but the rows


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_pth(
        tmp_path_factory.mktemp("checkpoint") / "random.pth",
        random_checkpoint(layers=2, width=128, vocab=65536, seed=1),
    )


@pytest.fixture(scope="module")
def runner():
    return TorchRunner(tiny(), [torch.device("cpu")], torch.float32)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpu", "is no device"),
        ("mps", "is not supported"),
        ("cuda:77", "is not there"),
        ("cpu:1", "all cores are one device"),
    ],
)
def test_a_device_that_cannot_be_had_is_named(name, why):
    with pytest.raises(DeviceError, match=f"--device {name} .*{why}"):
        device.find_device(name)


def rows_offered(ask: Callable[[], object]) -> int:
    """The number of rows that the refusal of `ask` names. Nothing of what was refused stays in memory."""
    with pytest.raises(DeviceError) as refused:
        ask()
    sentence = str(refused.value)
    del refused
    gc.collect()
    assert sentence.endswith(".") and ". " not in sentence
    return int(sentence.split("--max-rows ")[1].rstrip("."))


@pytest.mark.parametrize("l1", [0, 3])
def test_the_refusal_of_too_many_rows_names_a_number_that_works(path, free_memory, l1):
    free_memory(40 * MIB)
    rows = rows_offered(lambda: Engine(path, device="cpu", max_rows=40_000, l1=l1, prefill_tokens=16))
    assert 1 <= rows < 40
    engine = Engine(path, device="cpu", max_rows=rows, l1=l1, prefill_tokens=16)
    assert engine.info.slots == rows
    assert len(engine.generate(["hello"] * (rows + 2), max_tokens=2, stop_ids=[])) == rows + 2
    with pytest.raises(DeviceError):
        Engine(path, device="cpu", max_rows=rows + 1, l1=l1, prefill_tokens=16)


def test_the_number_is_the_largest_that_fits(runner, free_memory):
    free_memory(50 * MIB)
    rows = rows_offered(lambda: memory.rows_that_fit(runner, 10**9, 16, 256))
    needed = [runner.bytes_needed(n, 16, 256) for n in (rows, rows + 1)]
    assert needed[0] <= 50 * MIB < needed[1]


def test_what_was_not_asked_for_is_what_suits_the_device(runner, free_memory):
    assert memory.rows_that_fit(runner, None, 16, 256) == limits.CPU_ROWS
    free_memory(12 * MIB)
    little = memory.rows_that_fit(runner, None, 16, 256)
    assert 1 <= little < limits.CPU_ROWS
    assert memory.rows_that_fit(runner, None, 0, 256) > little
    assert memory.rows_that_fit(runner, None, 16, 16) > little


class RowsOf:
    """A runner on a GPU whose rows take a MiB each, as do idle slots, and prefills 100."""

    device, limits = torch.device("cpu"), limits.GPU_LIMITS
    devices = (device,)

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        return (rows + idle_slots + 100) * MIB


class TestRowsOfAGpu:
    def rows(self, monkeypatch, mib: int, asked: int | None = None) -> int:
        monkeypatch.setattr(memory, "free_bytes", lambda device: mib * MIB)
        return memory.rows_that_fit(RowsOf(), asked, 16, 4096)

    def test_the_log_says_how_many_would_fit(self, monkeypatch, caplog):
        caplog.set_level("INFO")
        assert self.rows(monkeypatch, 500) == 500 - 116
        assert self.rows(monkeypatch, 1140 + 4000) == limits.GPU_LIMITS.rows == 1024
        assert "--max-rows 5024 would fit" in caplog.text

    def test_as_many_as_fit_run_where_they_are_asked_for(self, monkeypatch, caplog):
        caplog.set_level("INFO")
        assert self.rows(monkeypatch, 6000, asked=5884) == 5884
        assert "5884 (as asked for)" in caplog.text
        with pytest.raises(DeviceError, match="--max-rows 5884"):
            self.rows(monkeypatch, 6000, asked=5885)


class ScarceRunner:
    """A GPU whose rows and idle slots take 10 MiB each, and a step 200 of its own and 0.25 for each token."""

    device, limits = torch.device("cpu"), limits.GPU_LIMITS
    devices = (device,)

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        return ((rows + idle_slots) * 10 + 200 + (rows + prefill_tokens) // 4) * MIB


class TestScarceMemory:
    """What nobody has asked for gives way to the rows that somebody has."""

    def chosen(self, monkeypatch, mib: int, **asked: int) -> tuple[int, int, int]:
        monkeypatch.setattr(memory, "free_bytes", lambda device: mib * MIB)
        config = EngineConfig(**asked)
        tokens = memory.prompt_tokens(ScarceRunner(), config)
        return tokens, *memory.rows_and_idle_slots(ScarceRunner(), config, tokens)

    def test_plenty(self, monkeypatch):
        tokens, rows, idle = self.chosen(monkeypatch, 100_000)
        assert (tokens, rows) == (4096, 1024) and idle > memory.L1

    @pytest.mark.parametrize(("mib", "tokens"), [(8000, 4096), (5000, 2048), (3000, 1024), (1000, 512)])
    def test_prompt_tokens_take_a_part_of_what_is_free(self, monkeypatch, mib, tokens):
        assert self.chosen(monkeypatch, mib)[0] == tokens
        assert self.chosen(monkeypatch, mib, prefill_tokens=700)[0] == 700

    def test_rows_asked_for_come_first(self, monkeypatch):
        rows = 100
        tight = 1000 + 200 + (rows + 512) // 4
        assert self.chosen(monkeypatch, tight + 165, max_rows=rows) == (512, rows, 16)
        assert self.chosen(monkeypatch, tight + 75, max_rows=rows) == (512, rows, 7)
        assert self.chosen(monkeypatch, tight, max_rows=rows) == (512, rows, 0)
        with pytest.raises(DeviceError, match="--max-rows 99"):
            self.chosen(monkeypatch, tight - 1, max_rows=rows)
        with pytest.raises(DeviceError, match="--max-rows"):  # as what was asked for does not
            self.chosen(monkeypatch, tight, max_rows=rows, l1=1)

    def test_one_row_runs_where_there_is_no_more_room(self, monkeypatch):
        one = 10 + 200 + (1 + 512) // 4
        assert self.chosen(monkeypatch, one) == (512, 1, 0)
        assert self.chosen(monkeypatch, one + 25) == (512, 1, 2)
        with pytest.raises(DeviceError, match="smaller model"):
            self.chosen(monkeypatch, one - 1)


def test_where_not_even_one_row_fits_another_way_out_is_named(runner, free_memory):
    free_memory(MIB)
    for asked in (None, 1):
        with pytest.raises(DeviceError, match="smaller model"):
            memory.rows_that_fit(runner, asked, 16, 256)


def test_memory_that_runs_out_in_spite_of_all_is_one_sentence():
    for error in (
        RuntimeError("you tried to allocate 1 bytes: not enough memory"),
        torch.OutOfMemoryError("CUDA"),
    ):
        with (
            pytest.raises(
                DeviceError,
                match=r"^5 rows do not fit into the .* GiB of memory left on cpu .*--max-rows",
            ),
            device.out_of_memory_as_error("5 rows", torch.device("cpu")),
        ):
            raise error
    with (
        pytest.raises(RuntimeError, match="launched"),
        device.out_of_memory_as_error("5 rows", torch.device("cpu")),
    ):
        raise RuntimeError("The kernel could not be launched")
    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        device.out_of_memory_as_error("5 rows", torch.device("cpu")),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("gib", "usable", "reserved"),
    [(8, 8, 512), (12, 12, 512), (18, 18, 768), (24, 24, 1024), (141, 141, 1024), (141, 12, 512)],
)
def test_small_gpus_leave_less_free(monkeypatch, gib, usable, reserved):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gib << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: usable / gib)
    assert device.reserve_bytes(torch.device("cuda", 0)) == reserved * MIB
    assert device.reserve_bytes(torch.device("cpu")) == 0


def test_what_is_stored_is_never_over_the_default_limit(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: usage._replace(free=100))
    assert memory.database_limit(tmp_path / "sessions.db", 0) == 50
    assert memory.database_limit(tmp_path / "sessions.db", 1000) == 1000


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    free = device.free_bytes(CPU)
    (tmp_path / "memory.stat").write_text(f"file {900 * MIB}\nanon {30 * MIB}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(device.free_bytes(CPU) - free) < free // 2
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    assert device.free_bytes(CPU) == 70 * MIB
    assert device.host_bytes() == 100 * MIB


@pytest.mark.parametrize("tokens", [1, 17, 300, 600])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [Buffers, Rwkv6Buffers])
def test_the_buffers_of_a_step_are_counted_from_their_shapes(tokens, packed, kind):
    cpu = torch.device("cpu")
    if kind is Buffers:
        shape = pack_weights(tiny(layers=3, width=192, vocab=500), cpu).buffer_shape
    else:
        shape = pack_rwkv6(from_tensors("rwkv6", random_rwkv6(2, 192, 500)), cpu).buffer_shape
    arena: dict[str, torch.Tensor] = {}
    kind(shape, tokens, arena, packed)
    assert buffer_bytes(shape, tokens, packed, kind) == sum(tensor.nbytes for tensor in arena.values()) > 0


@pytest.fixture
def small_gpu():
    """A GPU of which all but 3 GiB is taken."""
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 3072 * MIB, dtype=torch.uint8, device="cuda")
    yield
    del taken
    torch.cuda.empty_cache()


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_the_number_named_holds_under_the_heaviest_load(self, small_gpu):
        rows = rows_offered(lambda: Engine(device="cuda", max_rows=1_000_000, prefill_tokens=512, **PLAIN))
        assert rows > 100
        engine = Engine(device="cuda", max_rows=rows, prefill_tokens=512, **PLAIN)
        assert engine.info.slots == rows
        heavy = Sampling(temperature=3.0, alpha_presence=0.1, logit_bias=dict.fromkeys(range(500), 0.5))
        engine.add(
            (b"test", "all"),
            GenerateRequest(
                id="all", prompts=["hello " * 40] * rows, max_tokens=3, top_logprobs=1, sampling=heavy
            ),
        )
        ended = 0
        while engine.busy:
            for _, event in engine.step():
                assert isinstance(event, Accepted | Progress), event
                ended += (
                    sum(row.finish_reason is not None for row in event.rows)
                    if isinstance(event, Progress)
                    else 0
                )
        assert ended == rows

    @pytest.mark.parametrize("family", FAMILIES)
    def test_an_engine_never_holds_more_than_was_counted(self, family):
        gc.collect()
        others = torch.cuda.memory_allocated()  # what other tests in this process still hold
        checkpoint = from_tensors(family, FAMILIES[family](4, 256, 65536))
        engine = Engine(checkpoint, device="cuda", max_rows=300, prefill_tokens=2048, **PLAIN)
        weights = checkpoint.parameters * 2
        needed = engine.runner.bytes_needed(300, 0, 2048)
        torch.cuda.reset_peak_memory_stats()
        engine.generate(["hello " * 100] * 300, max_tokens=20, stop_ids=[], sampling=Sampling(top_p=0.9))
        assert torch.cuda.max_memory_allocated() - others - weights < needed - device.reserve_bytes(
            engine.runner.device
        )

    @pytest.mark.parametrize("device", ["cuda", "cuda:0+cuda:0"])
    @pytest.mark.parametrize("kind", ["int8", "int4"])
    def test_copies_in_fp8_count_as_weights(self, device, kind, monkeypatch):
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("--activations fp8 needs a Hopper GPU")
        time_nothing(monkeypatch)
        packed, taken = quantize(tiny(layers=4, width=512, vocab=500), kind), []
        for activations in ("fp8", None, "fp8"):  # the first one also has what libraries take
            with Engine(
                packed, device=device, activations=activations, max_rows=100, capture_late=True
            ) as engine:
                rows = engine.generate([[7, 8, 9]] * 100, max_tokens=3, stop_ids=[])
                assert [row.tokens for row in rows] == [3] * 100
                taken.append(engine.info.weight_bytes)
        copies = fp8_copy_bytes(packed.packed)
        assert copies <= taken[2] - taken[1] < 1.1 * copies
