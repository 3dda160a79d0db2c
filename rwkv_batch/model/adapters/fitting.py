"""Which kind of change a few tensors are, and whether they fit the model's tensor. One sentence if not."""

from collections.abc import Mapping

from torch import Tensor

from rwkv_batch.model.adapters.parts import BonePart, DoraPart, LoraPart, Part, ShardPart
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.files import CheckpointError

WRONG = "the adapter is of another model, or damaged"


def check(where: str, key: str, tensor: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """The tensor itself. Raises CheckpointError if it has another shape than wanted."""
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(
            f"{where}: {key} has shape {list(tensor.shape)} in place of {list(wanted)}; {WRONG}."
        )
    return tensor


def shape_of(where: str, target: str, key: str, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The shape of the model's tensor that a key changes. Raises CheckpointError if it cannot be changed."""
    shape = checkpoint.shape_of(target)
    if shape is None:
        raise CheckpointError(
            f"{where}: {key} is no tensor of {checkpoint.name}, nor a change of one that is known; {WRONG}."
        )
    if target == "emb.weight" and "blocks.0.ln0.weight" not in checkpoint.tensors:
        raise CheckpointError(
            f"{where}: {key} is for an embedding before ln0, which {checkpoint.name} has applied already; "
            "give the model's .pth file."
        )
    return shape


def part_of(where: str, prefix: str, found: Mapping[str, Tensor], shape: tuple[int, ...]) -> Part:
    """The change of the matrix of that shape, from the tensors with the prefix. Raises CheckpointError."""
    if len(shape) != 2:
        raise CheckpointError(
            f"{where}: {prefix}.weight is no matrix, so {prefix}.{min(found)} fits nothing; {WRONG}."
        )
    out, inputs = shape

    def checked(suffix: str, *wanted: int) -> Tensor:
        return check(where, f"{prefix}.{suffix}", found[suffix], wanted)

    match sorted(found):
        case ["lora_A", "lora_B"] | ["lora_A", "lora_B", "lora_M"]:
            lora = lora_of(where, prefix, found, shape)
            return DoraPart(lora, checked("lora_M", 1, inputs)) if "lora_M" in found else lora
        case ["disha"] if found["disha"].dim() == 2:
            return ShardPart(checked("disha", len(found["disha"]), out).mT, scaled=False)
        case ["bone" | "disha" as suffix]:
            rank = found[suffix].shape[-1]
            if out % rank or inputs % rank:
                raise CheckpointError(
                    f"{where}: {prefix}.{suffix} has blocks of {rank}, which do not divide the model's "
                    f"[{out}, {inputs}]; {WRONG}."
                )
            return BonePart(checked(suffix, inputs // rank, rank, rank))
        case ["weight.D"]:
            return ShardPart(checked("weight.D", out, found["weight.D"].shape[-1]), scaled=True)
    raise CheckpointError(
        f"{where}: {prefix} has {' and '.join(sorted(found))}, which is no whole change of one kind; {WRONG}."
    )


def lora_of(where: str, prefix: str, pair: Mapping[str, Tensor], shape: tuple[int, ...]) -> LoraPart:
    """The pair lora_A, lora_B for a matrix of that shape. Raises CheckpointError."""
    out, inputs = shape
    rank = len(pair["lora_A"])
    return LoraPart(
        check(where, f"{prefix}.lora_A", pair["lora_A"], (rank, inputs)),
        check(where, f"{prefix}.lora_B", pair["lora_B"], (out, rank)),
    )
