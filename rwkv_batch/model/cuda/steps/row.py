"""A decode step of one row by one launch."""

from torch import Tensor

from rwkv_batch.model.cuda.packed.coded import CodedMatrix, LargeMatrix, first_bytes
from rwkv_batch.model.cuda.packed.weights import CudaLayer, CudaWeights
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.ops.cuda.abi import ROW_HALF, ROW_INT4, ROW_INT8, ROW_INT8_COLUMNS, ROW_WIDE_INT4
from rwkv_batch.ops.cuda.binding import Addend, Kernels
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.special.row import FUNCTIONS, MATRICES, RowKernel

FORMS = {
    ("int4", False): ROW_INT4,
    ("int4-128", False): ROW_WIDE_INT4,
    ("int8", False): ROW_INT8,
    ("int8", True): ROW_INT8_COLUMNS,
    ("fp16", True): ROW_HALF,
}  # by the format and whether value lies by hidden units


class RowStep:
    """Steps of one row of a model."""

    def __init__(self, kernels: Kernels, weights: CudaWeights) -> None:
        last, ahead = weights.layers[-1], first_bytes(weights.head)
        tensors = [_tensors(layer, last) for layer in weights.layers]
        form = FORMS[_how_value_lies(last)]
        self.kernel = RowKernel(kernels, form, tensors, len(last.key), weights.norm_out, ahead)
        self._table = weights.embedding

    @classmethod
    def for_model(cls, kernels: Kernels, weights: CudaWeights) -> "RowStep | None":
        """None if there is no kernel for this GPU, format or shape."""
        layer = weights.layers[-1]
        if (
            not kernels.has_row
            or kernels.invariant
            or layer.deep_embed
            or not layer.low_in.keys() >= {*FUNCTIONS}
        ):
            return None
        large = (*layer.rkv, layer.output, layer.key, layer.value)
        if len({_format(one) for one in large}) > 1 or _how_value_lies(layer) not in FORMS:
            return None
        step = cls(kernels, weights)
        return step if step.kernel.fits else None

    def run(self, tokens: Tensor, slots: Tensor, states: CudaStates, b: Buffers) -> Addend | None:
        """Launch the layers of one row, as many of the first ones as there are states of."""
        assert states.feed.pending is not None
        self.kernel.run(tokens, slots, self._table, b, states.shift, states.wkv, states.feed.pending)
        return None if self.kernel.normalizes else Addend()


def _format(matrix: LargeMatrix) -> str:
    return matrix.format if isinstance(matrix, CodedMatrix) else "fp16"


def _how_value_lies(layer: CudaLayer) -> tuple[str, bool]:
    value = layer.value
    return _format(value), not isinstance(value, CodedMatrix) or value.columns


def _tensors(layer: CudaLayer, last: CudaLayer) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name in FUNCTIONS:
        # Layer 0 has no value residual. What the kernel reads in its place must be as large; it is not used.
        found[f"{name}_inner"] = layer.low_in.get(name, last.low_in[name])
        found[f"{name}_outer"] = layer.low_out.get(name, last.low_out[name])
    large = (*layer.rkv, layer.output, layer.key, layer.value)
    for name, matrix in zip(MATRICES, large, strict=True):
        coded = isinstance(matrix, CodedMatrix)
        found |= {name: matrix.codes if coded else matrix, f"{name}_scales": matrix.scales if coded else None}
    return found | {
        "norm1_weight": layer.norm1.weight,
        "norm1_bias": layer.norm1.bias,
        "mixes": layer.mixes,
        "norm2_weight": layer.norm2.weight,
        "norm2_bias": layer.norm2.bias,
        "x_k": layer.x_k,
        "w0": layer.offsets["w"],
        "a0": layer.offsets["a"],
        "v0": layer.offsets.get("v"),
        "k_k": layer.k_k,
        "k_a": layer.k_a,
        "r_k": layer.r_k,
        "group_weight": layer.group_norm.weight,
        "group_bias": layer.group_norm.bias,
    }
