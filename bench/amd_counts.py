"""What the inner loops of the AMD kernels are made of, counted in the compiled code.

COUNTS is what `python bench/amd_prediction.py --count` prints, which compiles the kernels with the tools of
hip/check.py and reads LLVM's disassembly. No count needs a GPU or is measured on one.

Of a kernel one loop is counted, once through: the shortest one that holds as many instructions of a kind
(LOOPS) as any loop of the kernel does. A loop is what lies between a backward branch and its target, so both
sides of a branch inside it count. A kernel that is not in LOOPS but in STRAIGHT is counted whole.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Count(NamedTuple):
    """Of one wave and pass. lds: passes of 4 bytes a lane through the LDS unit. valu: issues of a vector ALU,
    four for an instruction of a quarter of the rate."""

    lds: int
    valu: int


# clang 19, with the matrix cores in prepare and scan
COUNTS: dict[str, dict[str, Count]] = {
    "gfx942": {
        "finish": Count(72, 778),
        "flush": Count(0, 189),
        "norm": Count(24, 225),
        "norm 1": Count(24, 277),
        "norm 6": Count(24, 426),
        "prefill norm 6": Count(56, 400),
        "prepare": Count(547, 2043),
        "relu square": Count(0, 50),
        "sample": Count(0, 274),
        "scan": Count(0, 288),
        "short 16": Count(512, 1480),
        "short 8": Count(256, 900),
        "sparse 1": Count(102, 1011),
        "sparse 2": Count(102, 1011),
        "sparse 4": Count(102, 1011),
        "sparse 8": Count(102, 1011),
        "stream16 16": Count(512, 1480),
        "stream16 8": Count(256, 900),
        "stream32 16": Count(256, 1396),
        "stream32 8": Count(128, 847),
        "wkv fp16": Count(406, 1131),
        "wkv fp16 deferred": Count(130, 347),
        "wkv fp16 rest": Count(63, 833),
        "wkv fp32": Count(132, 250),
        "wkv fp32 rest": Count(44, 423),
    },
    "gfx1100": {
        "finish": Count(72, 866),
        "flush": Count(0, 228),
        "norm": Count(24, 197),
        "norm 1": Count(24, 258),
        "norm 6": Count(24, 324),
        "prefill norm 6": Count(56, 328),
        "prepare": Count(679, 2339),
        "relu square": Count(0, 45),
        "sample": Count(0, 334),
        "scan": Count(24, 1020),
        "short 16": Count(512, 1233),
        "short 8": Count(256, 767),
        "sparse 1": Count(102, 909),
        "sparse 2": Count(102, 878),
        "sparse 4": Count(102, 878),
        "sparse 8": Count(102, 878),
        "stream16 16": Count(512, 1180),
        "stream16 8": Count(256, 750),
        "stream32 16": Count(256, 1245),
        "stream32 8": Count(128, 776),
        "wkv fp16": Count(406, 1028),
        "wkv fp16 deferred": Count(130, 317),
        "wkv fp16 rest": Count(63, 815),
        "wkv fp32": Count(132, 224),
        "wkv fp32 rest": Count(44, 421),
    },
}

DOTS = r"v_\w*(dot2|mfma|wmma)"
WIDE_STORE = r"global_store_(dwordx4|b128)"
# Name of a count: a part of the kernel's mangled name, and the instructions that mark the loop.
LOOPS = {
    "stream16 8": ("gemm_stream_kernelILi1ELi1ELi8E", DOTS),
    "stream16 16": ("gemm_stream_kernelILi2ELi1ELi8E", DOTS),
    "stream32 8": ("gemm_stream_kernelILi1ELi2ELi8E", DOTS),
    "stream32 16": ("gemm_stream_kernelILi2ELi2ELi8E", DOTS),
    "short 8": ("gemm_stream_kernelILi1ELi1ELi2E", DOTS),
    "short 16": ("gemm_stream_kernelILi2ELi1ELi2E", DOTS),
    "sparse 1": ("gemm_sparse_kernelILi1E9HalfUnits", DOTS),
    "sparse 2": ("gemm_sparse_kernelILi2E9HalfUnits", DOTS),
    "sparse 4": ("gemm_sparse_kernelILi4E9HalfUnits", DOTS),
    "sparse 8": ("gemm_sparse_kernelILi8E9HalfUnits", DOTS),
    "wkv fp16": ("wkv_decode_kernelIN12_GLOBAL__N_14HalfE", DOTS),
    "wkv fp32": ("wkv_decode_kernelIN12_GLOBAL__N_16SingleE", WIDE_STORE),
    "flush": ("wkv_flush_kernel", "global_"),
    "prepare": ("wkv_prefill_prepare_kernel", "ds_"),
    "scan": ("wkv_prefill_scan_kernelIt", DOTS),
    "finish": ("wkv_prefill_finish_kernel", "ds_"),
    "prefill norm 6": ("norm_mix_prefill_kernelILi8ELi6ELb0E", "ds_bpermute"),
    "sample": ("sample_kernelI6__halfLb0E", "global_load"),
}
STRAIGHT = {
    "norm": "_Z11norm_kernelILi8E",
    "norm 6": "norm_mix_decode_kernelILi8ELi6E",
    "norm 1": "norm_mix_decode_kernelILi8ELi1E",
    "relu square": "relu_square_kernel",
}
# Of these the rest of the outermost loop is counted too (name + " rest"), which runs once for each row and
# head; and of DEFERS, what passes that write no state can meet (name + " deferred").
OUTER = ("wkv fp16", "wkv fp32")
DEFERS = "wkv fp16"

KERNEL = re.compile(r"^[0-9a-f]+ <(\w+)>:\n((?:.+\n)*)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\t(\S+).*// ([0-9A-F]{12}):[^<]*(?:<\w+\+0x([0-9a-f]+)>)?")
QUARTER_RATE = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_|v_mad_[iu]64|_f64")
# In the time of so many issues of a CU's vector ALUs its matrix cores do a product of 16 x 16 x 16: 2048 fp16
# operations a clock on MI300X, 512 on RX 7900 XTX.
MATRIX = {"v_mfma_f32_16x16x16": 4, "v_wmma_f32_16x16x16": 32}


@dataclass(frozen=True)
class Instruction:
    name: str
    at: int  # bytes from the kernel's beginning
    target: int | None  # of a branch

    @property
    def lds(self) -> int:
        if not self.name.startswith("ds_"):
            return 0
        width = re.search(r"_[biu](8|16|32|64|96|128)\b", self.name)
        both = re.match(r"ds_(read2|write2|\w+_2addr)", self.name)
        return max(int(width[1]) // 32 if width else 1, 1) * (2 if both else 1)

    @property
    def valu(self) -> int:
        if not self.name.startswith("v_"):
            return 0
        if self.name.startswith(tuple(MATRIX)):
            return next(issues for name, issues in MATRIX.items() if self.name.startswith(name))
        return 4 if QUARTER_RATE.search(self.name) else 1


Code = list[Instruction]


def instructions(text: str) -> Code:
    """Of one kernel's disassembly."""
    lines = [found for line in text.splitlines() if (found := INSTRUCTION.match(line))]
    first = int(lines[0][2], 16)
    return [Instruction(x[1], int(x[2], 16) - first, int(x[3], 16) if x[3] else None) for x in lines]


def total(code: Collection[Instruction]) -> Count:
    return Count(sum(one.lds for one in code), sum(one.valu for one in code))


def loops(code: Code) -> Iterator[Code]:
    """Every loop, between a branch and its target before it."""
    for end, one in enumerate(code):
        if "branch" in one.name and one.target is not None and one.target <= one.at:
            yield [x for x in code[: end + 1] if x.at >= one.target]


def marked_loop(code: Code, mark: str) -> Code:
    """The shortest loop with as many instructions that match `mark` as any."""
    marks = [(sum(bool(re.match(mark, x.name)) for x in loop), -len(loop), loop) for loop in loops(code)]
    return max(marks, key=lambda found: found[:2])[2]


def without(loop: Code, banned: str) -> Code:
    """What passes through a loop can meet that meet no instruction matching `banned`."""
    place = {one.at: i for i, one in enumerate(loop)}
    next_of: list[list[int]] = []
    for i, one in enumerate(loop):
        after = [] if one.name in ("s_branch", "s_endpgm") else [i + 1]
        if "branch" in one.name and one.target in place:
            after.append(place[one.target])
        keeps = not re.match(banned, one.name)
        next_of.append([n for n in after if n < len(loop)] if keeps else [])
    before_of: list[list[int]] = [[] for _ in loop]
    for i, after in enumerate(next_of):
        for n in after:
            before_of[n].append(i)

    def reached(start: int, edges: list[list[int]]) -> set[int]:
        seen, stack = set(), [start]
        while stack:
            for n in edges[stack.pop()]:
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        return seen

    # All that lies on a circle through some branch; the largest such circle is the loop's.
    branches = [i for i, one in enumerate(loop) if "branch" in one.name]
    circles = (reached(i, next_of) & reached(i, before_of) for i in branches)
    return [loop[i] for i in sorted(max(circles, key=len))]


def counts_of(listing: str) -> Iterator[tuple[str, Count]]:
    """Of the disassembly of a code object, each kernel in it."""
    for symbol, text in KERNEL.findall(listing):
        for name, part in STRAIGHT.items():
            if part in symbol:
                yield name, total(instructions(text))
        for name, (part, mark) in LOOPS.items():
            if part not in symbol:
                continue
            code = instructions(text)
            loop = marked_loop(code, mark)
            yield name, total(loop)
            if name == DEFERS:
                yield f"{name} deferred", total(without(loop, WIDE_STORE))
            if name in OUTER:
                outer = total(max(loops(code), key=len))
                yield f"{name} rest", Count(outer.lds - total(loop).lds, outer.valu - total(loop).valu)


def count(gpus: Collection[str]) -> dict[str, dict[str, Count]]:
    """Compile the kernels for these GPUs and count."""
    from hip import check  # which installs a compiler if there is none
    from rwkv_batch.ops.cuda import build

    if "HIPCXX" not in os.environ:
        os.environ["HIPCXX"] = check.debian_compiler(check.ROOT / "build" / "hip-check" / "bitcode")
    found: dict[str, dict[str, Count]] = {gpu: {} for gpu in gpus}
    with tempfile.TemporaryDirectory() as folder:
        for gpu, code in check.code_objects(build.build(",".join(gpus)).read_bytes()):
            file = Path(folder) / "code.elf"
            file.write_bytes(code)
            listing = subprocess.run([check.tool("llvm-objdump"), "-d", file], **check.TEXT).stdout
            found[gpu].update(counts_of(listing))
    for gpu, counts in found.items():
        if missing := {*LOOPS, *STRAIGHT} - counts.keys():
            sys.exit(f"There are no kernels for {', '.join(sorted(missing))} on {gpu}; see LOOPS.")
    return found


def as_source(found: dict[str, dict[str, Count]]) -> str:
    """COUNTS, as it is written above."""
    lines = ["COUNTS: dict[str, dict[str, Count]] = {"]
    for gpu, counts in found.items():
        lines.append(f'    "{gpu}": {{')
        lines += [f'        "{name}": Count({c.lds}, {c.valu}),' for name, c in sorted(counts.items())]
        lines.append("    },")
    return "\n".join([*lines, "}"])
