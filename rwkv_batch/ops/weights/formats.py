"""All formats by name."""

from rwkv_batch.ops.weights.channels import Fp5Weight, Fp6Weight, Fp8Weight, Int8Weight
from rwkv_batch.ops.weights.groups import Int4Weight, Nf4Weight, WideInt4Weight
from rwkv_batch.ops.weights.halves import Bf16Weight, Fp16Weight
from rwkv_batch.ops.weights.weight import Weight

FORMATS: dict[str, type[Weight]] = {
    kind.format: kind
    for kind in (
        Fp16Weight,
        Bf16Weight,
        Int8Weight,
        Fp8Weight,
        Fp6Weight,
        Fp5Weight,
        Int4Weight,
        WideInt4Weight,
        Nf4Weight,
    )
}
