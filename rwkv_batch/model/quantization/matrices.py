"""Which matrices of a model are packed, for every family: the only place that says it.

They are the large ones, which every token is multiplied with. Never packed are the embedding, of which a
token reads one row, norms, vectors, low-rank pairs, and the tables of RWKV-7a.
"""

from rwkv_batch.model.checkpoint import Family
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.halves import HalfWeight

HEAD = "head.weight"  # the last product, onto the vocabulary
HEAD_FORMAT = "int8"  # of a quantized head beside any other format, as its errors go right into the logits
WITH_HEAD = ("fp16", "bf16", "int8", "fp8")  # formats with which the head is packed unless it is to stay
OF_LAYER: dict[Family, tuple[str, ...]] = {
    "rwkv7": ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"),
    "rwkv7a": ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value"),
    "rwkv6": (
        *("att.receptance", "att.key", "att.value", "att.gate", "att.output"),
        *("ffn.key", "ffn.value", "ffn.receptance"),
    ),
}


def formats_of(family: Family, layers: int, weights: str, head: bool | None) -> dict[str, str]:
    """The names of the matrices that are packed, and the format of each.

    weights: the format asked for. head: whether that of the head changes too; None: as suits the format.
    """
    names = [f"blocks.{layer}.{name}.weight" for layer in range(layers) for name in OF_LAYER[family]]
    found = dict.fromkeys(names, weights)
    if weights in WITH_HEAD if head is None else head:
        found[HEAD] = weights if is_half(weights) else HEAD_FORMAT
    return found


def is_half(weights: str) -> bool:
    """Whether a format has 16 bits a number, each rounded by itself."""
    return issubclass(FORMATS[weights], HalfWeight)
