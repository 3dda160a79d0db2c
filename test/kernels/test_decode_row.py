"""A decode step of one row by one launch, against the separate kernels and the model in fp32."""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu, off

from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda import rwkv7
from rwkv_batch.model.cuda.gemms.kinds import SEPARATE, TOGETHER
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.capture import capture
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv7 import RWKV7

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
LOGITS = 1e-2
SAME = 2e-3  # of two ways to round the same sums
VOCAB = 500
WIDTHS = [256, 768, 1024, 2048, 2560, 4096]  # of one to four tiles of a warp, with warps that have none
FP16_WIDTHS = [256, 512, 768, 1024, 2048, 2560]  # the last two by decode_row_wide.cu
LAYERS = 3, 5  # of codes; of fp16, more than it has tables of pointers at once
STEPS = 7  # states are written at every third


class Side:
    """One slot of a model, stepped by a way to run its layers."""

    def __init__(self, model: RWKV7Cuda, layers: str) -> None:
        self.model, self.layers, self.arena = model, layers, {}
        self.states = model.new_states(2)
        self.tokens = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.slots = torch.ones(1, dtype=torch.int32, device="cuda")
        self.logits = torch.empty(1, len(model.weights.head), dtype=torch.float16, device="cuda")

    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        self.tokens.fill_(token)
        self.states.feed.prepare()
        self.run()
        return self.logits[:, :VOCAB].clone()

    @torch.inference_mode()
    def run(self) -> None:
        self.model.autotuner.chosen["layers 1"] = self.layers
        self.model.decode(self.tokens, self.slots, self.states, self.logits, self.arena)

    def kept(self) -> list[torch.Tensor]:
        """All that a step changes besides logits."""
        return [self.states.shift, self.states.wkv, self.states.feed.pending, self.states.feed.records]


FORMS = {
    "int4": ("int4", False),
    "int4-128": ("int4-128", False),
    "int8": ("int8", False),
    "by hidden units": ("int8", True),
    "fp16": ("fp16", False),
    "wide fp16": ("fp16", False),
}
HALVES = {"fp16": 1024, "wide fp16": 2048}  # the width of their models
INACTIVE = 37  # of so many hidden units one is active in a sparse model


@pytest.fixture(params=[*FORMS])
def form(request):
    return request.param


CODED = [form for form in FORMS if form not in HALVES]
CASES = [*((form, width) for form in CODED for width in WIDTHS), *(("fp16", width) for width in FP16_WIDTHS)]


def packed(width: int, form: str, active: str = "half"):
    """active: of the hidden units half, a few (in some slices of 64 none), or all or none."""
    checkpoint = tiny(LAYERS[form in HALVES], width, VOCAB, seed=3)
    for name, tensor in checkpoint.tensors.items():
        if not name.endswith("ffn.key.weight") or active == "half":
            continue
        if active == "few":
            remain = torch.arange(len(tensor)) % INACTIVE == 0
            remain[: len(tensor) // 8] = False
            tensor.mul_(remain[:, None])
        else:
            tensor.copy_(tensor[:1] * (torch.rand(len(tensor), 1) + 0.5))
    return checkpoint if form in HALVES else quantize(checkpoint, FORMS[form][0], False)


def model_of(checkpoint, form: str) -> RWKV7Cuda:
    return RWKV7Cuda(checkpoint, "cuda", few_rows=FORMS[form][1])


@pytest.fixture
def model(hopper, form):
    return model_of(packed(HALVES.get(form, 1024), form), form)


@pytest.mark.parametrize(("form", "width"), CASES)
@pytest.mark.parametrize("active", ["half", "few", "all or none"])
def test_logits_and_states_are_those_of_separate_kernels(width, form, active):
    checkpoint = packed(width, form, active)
    model = model_of(checkpoint, form)
    if "together" not in model.gemms.candidates("layers", 1):
        pytest.skip("this GPU has no room for it")
    numbers = {name: weight.dequantize() for name, weight in checkpoint.packed.items()}
    truth = RWKV7(from_tensors("unpacked", dict(checkpoint.tensors) | numbers), "cuda")
    together, separate, wanted = Side(model, TOGETHER), Side(model, SEPARATE), truth.new_states(2)
    start = torch.randn_like(wanted.wkv) * 0.1
    for states in (together.states, separate.states, wanted):
        states.wkv.copy_(start)
    for token in range(5, 5 + STEPS):
        found, other = together.step(token), separate.step(token)
        want = truth.forward(torch.tensor([token]), [1], [1], wanted)
        assert off(found, other) < SAME and off(found, want) < LOGITS
        for mine, theirs in zip(together.kept()[:3], separate.kept()[:3], strict=True):
            assert off(mine, theirs) < SAME
        assert torch.equal(together.kept()[3], separate.kept()[3])
    together.states.flush([1])
    separate.states.flush([1])
    assert off(together.states.wkv, separate.states.wkv) < SAME


def small(form: str, change) -> RWKV7Cuda:
    """A model in that form; `change` is called with the name and numbers of each of its tensors."""
    checkpoint = tiny(LAYERS[form in HALVES], HALVES.get(form, 1024), VOCAB, seed=3)
    for name, tensor in checkpoint.tensors.items():
        change(name, tensor)
    return model_of(checkpoint if form in HALVES else quantize(checkpoint, FORMS[form][0], False), form)


@pytest.mark.parametrize("form", FORMS)
def test_wkv_states_that_pass_the_numbers_of_fp16_keep_the_largest(form):
    """Nothing decays, and tokens add some hundreds to numbers of +-65504."""

    def change(name: str, tensor: torch.Tensor) -> None:
        if name.endswith(("att.w0", "att.a0")):
            tensor.fill_(-30)
        elif name.endswith("att.k_a"):
            tensor.zero_()
        elif name.endswith(("att.key.weight", "att.value.weight")):
            tensor.mul_(20)

    model = small(form, change)
    together, separate = Side(model, TOGETHER), Side(model, SEPARATE)
    start = torch.where(torch.rand_like(together.states.wkv) < 0.5, -65504.0, 65504.0).half()
    for side in (together, separate):
        side.states.wkv.copy_(start)
    for token in range(5, 5 + STEPS):
        found, other = together.step(token), separate.step(token)
        assert found.isfinite().all() and off(found, other) < LOGITS
    for side in (together, separate):
        side.states.flush([1])
        assert side.states.wkv[1].abs().max() == 65504
        assert not torch.equal(side.states.wkv[1], start[1])
    assert off(together.states.wkv[1], separate.states.wkv[1]) < LOGITS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", ["ln1", "ln2"])
def test_token_shifts_that_pass_the_numbers_of_fp16_keep_the_largest(form, norm):
    """That of the first time mix, and that of the last channel mix: what is before them is as usual."""
    layer = 0 if norm == "ln1" else LAYERS[form in HALVES] - 1

    def change(name: str, tensor: torch.Tensor) -> None:
        if name == f"blocks.{layer}.{norm}.weight":
            tensor.fill_(60000)

    model = small(form, change)
    shifts = []
    for layers in (TOGETHER, SEPARATE):
        side = Side(model, layers)
        side.step(5)
        side.states.flush([1])
        shifts.append(side.states.shift[1, layer, int(norm == "ln2")])
    assert shifts[0].abs().max() == 65504 and off(*shifts) < SAME


def test_the_other_slot_and_those_of_padding_stay_as_they_are(model):
    side = Side(model, TOGETHER)
    side.states.wkv.normal_()
    side.states.shift.normal_()
    before = [tensor.clone() for tensor in side.kept()[:3]]
    side.step(3)
    assert all(torch.equal(now[0], then[0]) for now, then in zip(side.kept()[:3], before, strict=True))
    assert not torch.equal(side.states.shift[1], before[0][1])
    before = [tensor.clone() for tensor in side.kept()]
    side.slots.fill_(-1)
    side.step(3)
    assert all(torch.equal(now, then) for now, then in zip(side.kept(), before, strict=True))
    side.slots.fill_(1)
    assert side.step(3).isfinite().all()


def test_a_graph_gives_the_same_bits_a_hundred_times(form):
    """With more tiles than stages, and other kernels between its launches."""
    model = model_of(packed(HALVES.get(form, 4096), form), form)
    side = Side(model, TOGETHER)
    side.states.wkv.normal_(std=0.1)
    side.step(7)
    graph = capture(side.run)
    kept, first = [tensor.clone() for tensor in side.kept()], None
    for _ in range(100):
        for tensor, was in zip(side.kept(), kept, strict=True):
            tensor.copy_(was)
        for _ in range(3):
            graph.replay()
        now = [tensor.clone() for tensor in (side.logits, *side.kept())]
        first = first or now
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(now, first, strict=True))


def test_fewer_layers_in_between_change_nothing(model, monkeypatch):
    """A timed step has fewer layers, and counts and numbers of layers go on behind it."""
    monkeypatch.setattr(rwkv7, "TIMED_LAYERS", 2)
    timed, alone, beside = model.autotuner.step(1), Side(model, TOGETHER), Side(model, TOGETHER)
    for token in range(4):
        want = alone.step(token)
        with torch.inference_mode():
            timed(model.methods(1) | {"layers": TOGETHER})
        assert torch.equal(beside.step(token), want)


def test_a_model_whose_matrices_it_does_not_read_runs_separately():
    for checkpoint in (quantize(tiny(2, 1024, VOCAB), "fp8", False), tiny(2, 1536, VOCAB)):
        model = RWKV7Cuda(checkpoint, "cuda")
        assert model.row is None and model.gemms.candidates("layers", 1) == (SEPARATE,)
