"""The hot loop in the text of a kernel's machine code, and how long a GPU is busy issuing it."""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass

__all__ = ["SLOTS_PER_BYTE", "amd", "nvidia"]

# A slot is one instruction of one lane. An H200 copies 4.3 TB/s with 132 SMs at 1.98 GHz: 16.45
# bytes a clock and SM, in which it issues 4 warp instructions, that is 128 slots: 7.8 a byte.
# An MI300X has 304 CUs at 2.1 GHz (AMD's data sheet) and copies 4.18 TB/s (BabelStream, as AMD's
# acceptance guide demands it: 4177285 MB/s): 6.54 bytes a clock and CU, whose four SIMDs take a
# vector instruction for 64 lanes every 4 clocks, that is 64 slots: 9.8 a byte.
# Of the others what data sheets say, bandwidth too, of which a copy reaches some 85 %: an A100 of
# 80 GB 2.04 TB/s with 108 SMs at 1.41 GHz, a B200 8 TB/s with 148 at 1.97 GHz, half of an MI250X
# 1.64 TB/s with 110 CUs at 1.7 GHz. The table shows shares of them, no test holds them.
SLOTS_PER_BYTE = {"sm_90": 7.8, "gfx942": 9.8, "sm_80": 9.6, "sm_100": 4.7, "gfx90a": 7.3}

# Slower instructions of gfx942, by the rates in LLVM's model of it (SISchedule.td): a quarter for
# these, full for all others, 64-bit floats and integer products too.
QUARTER = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
# FLOP a clock of one SIMD's matrix core: 1307 TFLOPS and 2615 TOPS (data sheet) over 304 CUs.
MATRIX = {"bf16": 512, "f16": 512, "i8": 1024}
PRODUCT = re.compile(r"v_mfma_[fi]32_(\d+)x(\d+)x(\d+)_?(bf16|f16|i8)(?:_1k)?")
# Local memory moves 128 bytes a clock and CU, that is 2 bytes a lane in the time of a slot.
LOCAL = re.compile(r"ds_[a-z]+(2?)(?:st64)?_[biu](\d+)")


@dataclass(frozen=True)
class Syntax:
    """How a loop is found in a text.

    Attributes:
        label: what marks a place, and what a jump to it says.
        instruction: groups are its name, and its operands.
        jump: names of jumps.
        hot: names of which a hot loop has one: loads and products.
        last: the name of the instruction behind which there is only padding.
    """

    label: re.Pattern[str]
    instruction: re.Pattern[str]
    jump: re.Pattern[str]
    hot: re.Pattern[str]
    last: str


NVIDIA = Syntax(
    re.compile(r"\.L_x_\d+"),
    re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)"),
    re.compile("BRA"),
    re.compile("LDG|LDGSTS|HMMA|HGMMA|IMMA"),
    "EXIT",
)
AMD = Syntax(
    re.compile(r"\.LBB\d+_\d+"),
    re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)(.*)"),
    re.compile(r"s_c?branch\w*"),
    re.compile(r"(?:global|buffer)_load_\w+|v_mfma_\w+"),
    "s_endpgm",
)


def nvidia(text: str) -> tuple[float, collections.Counter[str]]:
    """Slots of the hot loop, one for each instruction, and how many of which there are."""
    loop = collections.Counter({k: v for k, v in _longest(text, NVIDIA).items() if k != "NOP"})
    return sum(loop.values()), loop


def amd(text: str) -> tuple[float, collections.Counter[str]]:
    """The same, where the busiest pipe decides: a SIMD issues to one after another, from several
    waves, in the time of a vector instruction. Waiting (``s_waitcnt``, ``s_nop``, ``s_barrier``)
    takes none of them, a vector instruction one slot or four, one of the matrix core its FLOP."""
    loop = _longest(text, AMD)
    pipes: dict[str, float] = collections.defaultdict(float)
    for name, count in loop.items():
        pipe = re.match("[a-z]+", name)
        assert pipe is not None
        if name.startswith("v_mfma_"):
            product = PRODUCT.fullmatch(name)
            assert product is not None, f"how long does {name} take?"
            flop = 2 * int(product[1]) * int(product[2]) * int(product[3])
            pipes["matrix"] += count * flop / (4 * MATRIX[product[4]])
            pipes["v"] += count
        elif pipe[0] == "ds":
            local = LOCAL.match(name)
            assert local is not None, f"how long does {name} take?"
            pipes["ds"] += count * (2 if local[1] else 1) * max(4, int(local[2]) // 8) / 2
        elif name not in ("s_waitcnt", "s_nop", "s_barrier"):
            pipes[pipe[0]] += count * (4 if QUARTER.match(name) else 1)
    return max(pipes.values()), loop


def _longest(text: str, syntax: Syntax) -> collections.Counter[str]:
    """The longest loop that loads or multiplies; the whole kernel if none does."""
    labels: dict[str, int] = {}
    names: list[str] = []
    best: list[str] = []
    for line in text.splitlines():
        if label := re.match(rf"\s*({syntax.label.pattern}):", line):
            labels[label[1]] = len(names)
        if found := syntax.instruction.search(line):
            names.append(found[1])
            to = syntax.label.search(found[2])
            if syntax.jump.fullmatch(found[1]) and to and to[0] in labels:
                body = names[labels[to[0]] :]
                if len(body) > len(best) and any(map(syntax.hot.fullmatch, body)):
                    best = body
    if not best:
        best = names[: 1 + max(i for i, name in enumerate(names) if name == syntax.last)]
    return collections.Counter(best)
