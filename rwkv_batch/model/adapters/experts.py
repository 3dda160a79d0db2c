"""The tensors of MoLE, a mixture of LoRA experts in every channel mix, as RWKV-LM-RLHF saves them.

    blocks.0.ffn.moe_info [2]                             E experts, and how many are active for a token
    blocks.0.ffn.router.linear.weight [E - 1, C]          and .bias [E - 1] where the rule is "shared"
    blocks.0.ffn.expert_1.key.lora_A_expert_0 [r, C]      a change of ffn.key and ffn.value for each expert,
    blocks.0.ffn.expert_1.value.bone_expert_0             LoRA or Bone

The number at the end of an expert's names is 0, as the trainer writes it, or that of the expert. Which of two
rules the router was trained with (see `rwkv_batch.ops.mole`) is not in the file, but for that bias, which
not every revision of the trainer may have had.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.model.adapters.fitting import WRONG, check, part_of, shape_of
from rwkv_batch.model.adapters.parts import BonePart, LoraPart
from rwkv_batch.model.checkpoint import TITLES, Checkpoint
from rwkv_batch.model.files import CheckpointError

OF_EXPERTS = re.compile(r"blocks\.(\d{1,4})\.ffn\.(moe_info|router\.linear\.(?:weight|bias)|expert_\d.*)$")
EXPERT = re.compile(r"expert_(\d{1,4})\.(key|value)\.(lora_A|lora_B|bone)_expert_(\d{1,4})$")

ExpertPart = LoraPart | BonePart


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one channel mix."""

    router: Tensor  # [E - 1, C]: the scores of all experts but the first
    bias: Tensor | None  # [E - 1]
    active: int  # experts of a token
    changes: tuple[tuple[ExpertPart, ExpertPart], ...]  # of ffn.key and ffn.value, for each of E experts


def is_of_experts(key: str) -> bool:
    """Whether a tensor belongs to MoLE."""
    return OF_EXPERTS.match(key) is not None


def expert_layers(
    where: str, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[ExpertLayer, ...]:
    """The experts of every layer; none if there are no tensors of experts. Raises CheckpointError."""
    if not tensors:
        return ()
    if checkpoint.family != "rwkv7":
        raise CheckpointError(
            f"{where} is MoLE, which is made for RWKV-7 and not for {TITLES[checkpoint.family]}."
        )
    layers: dict[int, dict[str, Tensor]] = {layer: {} for layer in range(checkpoint.layers)}
    for key, tensor in tensors.items():
        match = OF_EXPERTS.match(key)
        assert match is not None
        if int(match[1]) not in layers:
            raise CheckpointError(
                f"{where}: {key} is of a layer that {checkpoint.name} does not have; {WRONG}."
            )
        layers[int(match[1])][match[2]] = tensor
    return tuple(_layer(where, layer, found, checkpoint) for layer, found in layers.items())


def _layer(where: str, layer: int, found: dict[str, Tensor], checkpoint: Checkpoint) -> ExpertLayer:
    ffn = f"blocks.{layer}.ffn."
    for name in ("moe_info", "router.linear.weight"):
        if name not in found:
            raise CheckpointError(f"{where}: {ffn}{name} is missing; {WRONG}.")
    info = check(where, f"{ffn}moe_info", found.pop("moe_info"), (2,)).tolist()
    count, active = (int(number) for number in info)
    if [count, active] != info or not 1 <= active <= count or count < 2:
        raise CheckpointError(f"{where}: {ffn}moe_info says {info[1]} active of {info[0]} experts; {WRONG}.")
    scores = (count - 1, checkpoint.width)
    router = check(where, f"{ffn}router.linear.weight", found.pop("router.linear.weight"), scores)
    bias = found.pop("router.linear.bias", None)
    if bias is not None:
        check(where, f"{ffn}router.linear.bias", bias, scores[:1])
    groups: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in found.items():
        match = EXPERT.match(name)
        expert = int(match[1]) if match else count
        if match is None or expert >= count or int(match[4]) not in (0, expert):
            raise CheckpointError(f"{where}: {ffn}{name} is no tensor of {count} experts; {WRONG}.")
        group = groups.setdefault((expert, match[2]), {})
        if match[3] in group:
            raise CheckpointError(f"{where}: {ffn}{name} is there under two names; {WRONG}.")
        group[match[3]] = tensor

    def change(expert: int, name: str) -> ExpertPart:
        prefix = f"{ffn}expert_{expert}.{name}"
        if (expert, name) not in groups:
            raise CheckpointError(f"{where}: {prefix} is missing; {WRONG}.")
        shape = shape_of(where, f"{ffn}{name}.weight", prefix, checkpoint)
        part = part_of(where, prefix, groups[expert, name], shape)
        assert isinstance(part, LoraPart | BonePart)  # the only kinds that EXPERT lets through
        return part

    changes = tuple((change(expert, "key"), change(expert, "value")) for expert in range(count))
    return ExpertLayer(router, bias, active, changes)
