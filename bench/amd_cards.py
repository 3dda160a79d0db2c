"""The two AMD GPUs that steps are predicted for, and what a launch should take on them.

The time of a launch is LAUNCH plus the largest of
    bytes / (MEMORY_SHARE x memory bandwidth)
    LDS passes / (UNIT_SHARE x busy CUs x clock)                         of 32 lanes, 4 bytes each
    issues of vector ALUs x 32 lanes / (UNIT_SHARE x 64 x busy CUs x clock)
    operations of a GEMM by hipBLASLt / (MATRIX_SHARE x matrix peak)

Assumed, with nothing measured on an AMD GPU: the three shares and LAUNCH; the LDS unit of a CU serves 32
lanes a clock, and ds_bpermute (a shuffle) like any access; no bank conflicts; a CU issues vector instructions
for 64 lanes a clock, v_dot2 at the full rate, no two at once; LDS, ALUs and memory work at the same time.

Left out: latency, occupancy, spilled registers, scalar instructions, first-level caches, uneven shares of
work, lower clocks under load, and the host. So a kernel with few blocks or long chains takes longer.
"""

import math
from dataclasses import dataclass

MEMORY_SHARE = 0.8  # of the data sheet's bandwidth; a device copy on an H200 reaches 0.87
UNIT_SHARE = 0.8  # of the clocks of LDS units or vector ALUs, whichever are busier
MATRIX_SHARE = 0.5  # of the data sheet's fp16 operations, in a large GEMM by hipBLASLt
# Seconds in which the GPU does nothing else, as launches do not overlap on AMD GPUs. On an H200 a step of one
# row of 7.2B takes 1.1 ms longer in the portable build, with about 260 launches, than in the CUDA build,
# which overlaps them (hip/README.md): 4 us each.
LAUNCH = 5e-6


@dataclass(frozen=True)
class Card:
    name: str
    bandwidth: float  # bytes/s
    units: int  # CUs
    clock: float  # Hz, the highest
    matrix: float  # fp16 operations/s, dense
    wave: int  # lanes


CARDS = {
    # AMD Instinct MI300X Accelerator Data Sheet (2023): 5.3 TB/s, 304 CUs, 2100 MHz, 1307.4 TFLOP/s.
    "gfx942": Card("MI300X", 5.3e12, 304, 2.1e9, 1307.4e12, 64),
    # AMD Radeon RX 7900 XTX product page: 960 GB/s, 96 CUs, up to 2500 MHz, 122.8 TFLOP/s.
    "gfx1100": Card("RX 7900 XTX", 960e9, 96, 2.5e9, 122.8e12, 32),
}


@dataclass(frozen=True)
class Launches:
    """Some equal launches of a kernel. moved: bytes of one; lds, valu: clocks of one, of all CUs together."""

    source: str
    moved: float
    lds: float = 0.0
    valu: float = 0.0
    blocks: float = math.inf
    operations: float = 0.0  # of a GEMM by a library
    number: int = 1

    def work_seconds(self, card: Card) -> float:
        """Of one, from its first to its last instruction."""
        memory = self.moved / (MEMORY_SHARE * card.bandwidth)
        clocks = max(self.lds, self.valu) / (UNIT_SHARE * self.clocks_a_second(card))
        return max(memory, clocks, self.operations / (MATRIX_SHARE * card.matrix))

    def clocks_a_second(self, card: Card) -> float:
        """Of all CUs that have a block."""
        return min(card.units, self.blocks) * card.clock

    def seconds(self, card: Card) -> float:
        """Of all of them."""
        return self.number * (self.work_seconds(card) + LAUNCH)

    def loads(self, card: Card) -> tuple[float, float, float]:
        """Shares in the data sheet's memory bandwidth, LDS clocks and ALU clocks, while it works."""
        work = self.work_seconds(card)
        clocks = self.clocks_a_second(card) * work
        return self.moved / card.bandwidth / work, self.lds / clocks, self.valu / clocks
