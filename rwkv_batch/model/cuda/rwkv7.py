"""RWKV-7 and 7a on a CUDA GPU: the function of `rwkv7.RWKV7` over the kernels in `cuda/`, in fp16."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.gemms import calls
from rwkv_batch.model.cuda.gemms.autotune import Autotuner
from rwkv_batch.model.cuda.gemms.gemms import Gemms, StepGemms
from rwkv_batch.model.cuda.gemms.kinds import HEAD, LAYERS, SPLITS, TOGETHER, WHOLE
from rwkv_batch.model.cuda.gemms.low_rank import small_gemm
from rwkv_batch.model.cuda.packed.weights import CudaDeepEmbed, CudaWeights, pack_weights
from rwkv_batch.model.cuda.steps.adapters import AdapterSlots, StepAdapters
from rwkv_batch.model.cuda.steps.graphs import graph_bytes, prefills_held
from rwkv_batch.model.cuda.steps.mixers import NormMixer, decode_norms, prefill_norms, time_mix_input
from rwkv_batch.model.cuda.steps.row import RowStep
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.model.cuda.steps.verify import MOST_TOKENS, VerifySteps, verify_graph_bytes
from rwkv_batch.model.tensors.description import DEEP_RANK
from rwkv_batch.ops.cuda.abi import (
    CHUNK,
    IDENTITY,
    MAX_LAG,
    ReadoutInput,
    TimeMixInput,
)
from rwkv_batch.ops.cuda.binding import Addend, NormMix, RowBounds
from rwkv_batch.ops.cuda.buffers import Buffers, buffer_bytes
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS
from rwkv_batch.ops.cuda.inputs.packing import DeviceRows, most_chunks
from rwkv_batch.ops.cuda.special import blaslt
from rwkv_batch.ops.torch_ops import HEAD_SIZE
from rwkv_batch.state.slots import slot_bytes

TIMED_LAYERS = 8  # in which GEMMs are timed between their neighbours


class RWKV7Cuda(CudaModel[CudaWeights, Buffers]):
    """RWKV-7, and 7a, whose channel mixes have a DeepEmbed."""

    defers, buffers, takes_adapters = True, Buffers, True

    @torch.inference_mode()
    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cuda",
        architecture: str | None = None,
        invariant: bool = False,
        few_rows: bool = False,
        part: range | None = None,
        fp8_copies: bool = False,
    ) -> None:
        super().__init__(checkpoint, device, architecture, invariant, few_rows, part, fp8_copies)
        with torch.cuda.device(self.device):
            whole = len(self.part) == checkpoint.layers
            self.row = RowStep.for_model(self.kernels, self.weights) if whole else None
            lt = blaslt.for_device(self.device)
            self.gemms = Gemms(self.kernels, self.weights, lt, self.row is not None, whole)
            # Which blocks of the WKV step divide among themselves.
            self._work = torch.zeros(1, device=self.device, dtype=torch.int32)
            self.autotuner = Autotuner.from_cache(self.gemms, self.device, self._timed_step)
        self.tuner = None if invariant else self.autotuner

    def step_bytes(self, rows: int, prefill_tokens: int, adapters: int = 0, most_rank: int = 0) -> int:
        most = prefill_tokens + rows
        # A row that fits into no launch with others runs alone, at any length.
        chunks = sum(max(most_chunks(tokens), -(-tokens // CHUNK)) for tokens in prefills_held(most))
        scratch = chunks * self.checkpoint.heads * self.kernels.chunk_bytes + self.weights.decoded_bytes
        layers, decoding = len(self.part), self.weights.decoding_launches
        more = graph_bytes(layers, rows, most, decoding) - graph_bytes(layers, rows, most)
        scratch += more * (2 if adapters else 1)
        return super().step_bytes(rows, prefill_tokens, adapters, most_rank) + scratch

    def tune_as(self, other: CudaModel[Any, Any]) -> None:
        self.tuner, name = None, torch.cuda.get_device_name
        if isinstance(other, RWKV7Cuda) and name(self.device) == name(other.device):
            self.autotuner = other.autotuner

    def methods(self, tokens: int) -> dict[str, str]:
        methods = self.gemms.invariant_methods if self.kernels.invariant else self.autotuner.methods
        return methods(tokens)

    def _pack_weights(self, few_rows: bool, fp8_copies: bool) -> CudaWeights:
        kind = self.kernels.architecture
        return pack_weights(self.checkpoint, self.device, kind, few_rows, self.part, fp8_copies)

    def _decode_layers(
        self,
        tokens: Tensor,
        slots: Tensor,
        states: CudaStates,
        b: Buffers,
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Addend | None:
        if methods[LAYERS] == TOGETHER and adapters is None and states.feed.pending is not None:
            assert self.row is not None
            return self.row.run(tokens, slots, states, b)
        wkv = partial(self.kernels.wkv_decode, slots=slots, fp32=states.wkv.dtype == torch.float32)
        norm_mix, of_rows = decode_norms(self.kernels, b, slots), StepAdapters(adapters, b)
        return self._run_layers(tokens, states, b, norm_mix, wkv, methods, of_rows)

    def _prefill_layers(
        self,
        tokens: Tensor,
        rows: DeviceRows,
        states: CudaStates,
        b: Buffers,
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Addend:
        heads, fp32 = b.x.shape[1] // HEAD_SIZE, states.wkv.dtype == torch.float32
        most_chunks = max((pieces.chunks for pieces in rows.pieces), default=0)
        items = b.scratch("items", most_chunks * heads * self.kernels.chunk_bytes)

        def wkv(inputs: TimeMixInput, *, readout: ReadoutInput | None) -> None:
            alone = self.kernels.invariant and fp32  # then wkv_sequence takes single tokens too
            if rows.single and not alone:
                self.kernels.wkv_decode(inputs, rows.rows.slots[: rows.single], fp32, rows.counted, readout)
            if self.kernels.invariant:
                assert readout is None
                left_out = (0, None) if alone else (rows.single, rows.counted)
                self.kernels.wkv_sequence(inputs, len(tokens), rows.rows, fp32, *left_out)
                return
            for pieces in rows.pieces:
                self.kernels.wkv_prefill(inputs, pieces, items, fp32, readout)

        whole = methods | dict.fromkeys(SPLITS, WHOLE)  # `b` has no room for more
        norm_mix, of_rows = prefill_norms(self.kernels, b, rows.rows), StepAdapters(adapters, b)
        return self._run_layers(tokens, states, b, norm_mix, wkv, whole, of_rows)

    def verify_bytes(self, wkv_dtype: torch.dtype, drafted: int) -> int:
        """What `verify_steps` takes, with spare slots for so many tokens of drafts."""
        slots = drafted * slot_bytes(len(self.part), self.checkpoint.width, self.dtype, wkv_dtype)
        logits = MOST_TOKENS * len(self.weights.head) * self.dtype.itemsize
        buffers = buffer_bytes(self._buffer_shape, MOST_TOKENS)
        return slots + logits + buffers + verify_graph_bytes(len(self.part))

    def verify_steps(self, states: CudaStates) -> VerifySteps:
        """What verifies drafts over these states, which have spare slots."""
        logits = torch.empty(MOST_TOKENS, len(self.weights.head), device=self.device, dtype=self.dtype)
        return VerifySteps(states, partial(self._verify, states, logits))

    def _verify(
        self,
        states: CudaStates,
        all_logits: Tensor,
        tokens: Tensor,
        rows: RowBounds,
        arena: dict[str, Tensor],
    ) -> Tensor:
        """Launch all layers and the head over packed rows of a few tokens, whose states are kept."""
        b, logits = self.new_buffers(len(tokens), arena), all_logits[: len(tokens)]
        states.feed.flush_slots(rows.slots)
        fp32, methods = states.wkv.dtype == torch.float32, self.methods(len(tokens))

        def wkv(inputs: TimeMixInput, *, readout: ReadoutInput | None) -> None:
            assert readout is None
            self.kernels.wkv_sequence(inputs, len(tokens), rows, fp32)

        norm_mix, of_rows = prefill_norms(self.kernels, b, rows), StepAdapters(None, b)
        self._norm_out(b, self._run_layers(tokens, states, b, norm_mix, wkv, methods, of_rows))
        self._head(b.normed, logits, methods)
        return logits

    def _head(self, x: Tensor, logits: Tensor, methods: dict[str, str]) -> None:
        self.gemms.find(HEAD, methods[HEAD]).run(calls.head(self.weights.head, x, logits))

    def _timed_step(self, rows: int) -> Callable[[dict[str, str]], object]:
        """Launches the first layers and the head over random tokens, to be timed with given methods.

        A few rows have states of their own, since the hidden units that are inactive in all of them decide
        how fast the sparse GEMM is. Of many rows some share a state, whose contents do not matter.
        """
        layers = min(TIMED_LAYERS, len(self.part))
        states = CudaStates(
            self.kernels, min(rows, SPARSE_ROWS[-1]), (layers, self.checkpoint.width), torch.float16
        )
        tokens = torch.randint(self.weights.vocab, (rows,), device=self.device, dtype=torch.int32)
        numbers = torch.arange(rows, device=self.device, dtype=torch.int32)
        b = Buffers(self._buffer_shape, rows, {})
        b.lag.copy_(numbers % (MAX_LAG + 1))
        if self.part.start:  # what a stage that is not the first begins with
            b.x.normal_()
            b.rkv0.normal_()
        logits = b.x.new_empty(rows, len(self.weights.head), dtype=torch.float16)

        slots = numbers % len(states)

        def run(methods: dict[str, str]) -> None:
            self._norm_out(b, self._decode_layers(tokens, slots, states, b, methods, None))
            self._head(b.normed, logits, methods)

        return run

    def _run_layers(
        self,
        tokens: Tensor,
        states: CudaStates,
        b: Buffers,
        norm_mix: NormMixer,
        wkv: Callable[..., None],
        methods: dict[str, str],
        adapters: StepAdapters,
    ) -> Addend:
        """Launch as many layers as there are states of. Returns what is still to be added to b.x."""
        gemms = StepGemms(self.gemms, methods, b, adapters)
        added, layers = self._embedded(tokens), self.weights.layers
        for index, layer in enumerate(layers[: states.wkv.shape[1]]):
            shift, early = states.shift[:, index], gemms.in_early
            norm_mix(NormMix(added, layer.norm1, shift[:, 0], layer.mixes, b.mixed, early, gemms.in_fp8))
            rkv = b.rkv if index or self.part.start else b.rkv0
            gemms.time_mix_in(layer, index, rkv)
            pending = None if states.feed.pending is None else states.feed.pending[:, index]
            time_mix = time_mix_input(layer, b, rkv, states.wkv[:, index], pending, self._work)
            wkv(time_mix, readout=adapters.readout(index))
            added, early = gemms.output(layer, index), gemms.key_early
            norm_mix(NormMix(added, layer.norm2, shift[:, 1], layer.x_k, b.mixed, early, gemms.key_fp8))
            gemms.key(layer, index)
            if layer.deep_embed:
                self._deep_embed(layer.deep_embed, tokens, b)
            last = index + 1 == states.wkv.shape[1]
            following = self.weights.head if last else layers[index + 1].rkv
            added = gemms.value(layer, index, following)
        return added

    def _deep_embed(self, weights: CudaDeepEmbed, tokens: Tensor, b: Buffers) -> None:
        """Scale the hidden units, where b.mixed has the tokens' own inputs behind the shifted ones."""
        count, kernels = len(tokens), self.kernels
        inner, own = (b.low[name].view(-1)[: count * DEEP_RANK].view(count, -1) for name in "wa")
        factors = b.mixed[2:].view(-1)[: b.hidden.numel()].view_as(b.hidden)
        small_gemm(kernels, (weights.inner, b.mixed[1], inner, IDENTITY))
        kernels.deep_embed(inner, weights.table, tokens, own)
        small_gemm(kernels, (weights.outer, own, factors, IDENTITY))
        kernels.deep_scale(b.hidden, factors, weights.offset)
