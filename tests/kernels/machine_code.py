"""Compile a Triton kernel with no GPU at hand, and read what its machine code says.

Registers, stack and spills come from ``cuobjdump``, instructions from ``nvdisasm``; both are in
Triton's wheel. For AMD the assembly that the compiler leaves behind says the same.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# The most shared memory that one program may ask for: the compiler does not check it.
SHARED = {"sm_90": 232448, "gfx942": 65536}
# An H200 copies 4.3 TB/s with 132 SMs at 1.98 GHz: 16.45 bytes a clock and SM, in which it
# issues 4 warp instructions, that is 128 of one lane: 7.8 for each byte.
SLOTS_PER_BYTE = 7.8
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\S*)(.*)")


@dataclass(frozen=True)
class Entry:
    """One kernel as it is launched.

    Attributes:
        name: of the row in the table.
        kernel: the jitted function.
        signature: the type of each argument that is no constant: ``"*bf16"``, ``"i32"``.
        constants: the others.
        each: elements of the main buffer that one thread handles in the hot loop, on sm_90.
        bytes: that move for each of them.
        divisible: integers that are multiples of 16 at a launch.
        narrow: loads that may be shorter than 16 bytes: scalars, and buffers whose part in
            the traffic is small (signs).
        narrow_stores: likewise.
        options: ``num_warps``, ``num_stages``.
        dots: whether tensor cores are to do the products.
        tiny: what it reads is little and in the cache, so that only its fit is checked.
        amd: the entry for gfx942, where the launcher chooses otherwise.
        wide: whether there must be a load or a store of 16 bytes.
        share: of the budget of instructions that the hot loop may take.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    each: float
    bytes: float
    divisible: tuple[str, ...] = ()
    narrow: int = 0
    narrow_stores: int = 0
    options: dict[str, int] = field(default_factory=dict)
    dots: bool = False
    tiny: bool = False
    amd: Entry | None = None
    wide: bool = True
    share: float = 0.75


@dataclass(frozen=True)
class Code:
    """What was found: ``slots`` are the instructions in the hot loop for each element, ``dots``
    those in the whole kernel that multiply tiles."""

    registers: int
    stack: int
    spills: int
    shared: int
    loads: int
    wide_loads: int
    stores: int
    wide_stores: int
    slots: float
    dots: int
    loop: dict[str, int]


def compiled(entry: Entry, target: str) -> Code:
    """Compile for ``"sm_90"`` or ``"gfx942"``."""
    if target == "gfx942" and entry.amd is not None:
        entry = entry.amd
    names = entry.kernel.arg_names
    signature = {k: "constexpr" if k in entry.constants else entry.signature[k] for k in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, k in enumerate(names)
        if signature[k].startswith("*") or k in entry.divisible
    }
    source = ASTSource(
        fn=entry.kernel, signature=signature, constexprs=entry.constants, attrs=aligned
    )
    found = triton.compile(source, target=TARGETS[target], options=dict(entry.options))
    if target == "gfx942":
        return _amd(found, entry)
    return _nvidia(found, entry)


def built(entry: Entry) -> None:
    """Build the kernel with integers of 64 bits, as it is launched where a size needs them."""
    wide = {k: "i64" if kind == "i32" else kind for k, kind in entry.signature.items()}
    signature = {
        k: "constexpr" if k in entry.constants else wide[k] for k in entry.kernel.arg_names
    }
    source = ASTSource(fn=entry.kernel, signature=signature, constexprs=entry.constants, attrs={})
    target = TARGETS["sm_90"]
    backend = make_backend(target)
    options = backend.parse_options(source.parse_options() | dict(entry.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    names = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(target, options, *names, context)


def _nvidia(found: Any, entry: Entry) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        text = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None, usage
    loop = _hot(text)
    return Code(
        registers=int(registers[1]),
        stack=int(registers[2]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        shared=found.metadata.shared,
        loads=len(re.findall(r"\bLDG(?:STS)?\.E", text)),
        wide_loads=len(re.findall(r"\bLDG(?:STS)?\.E\S*\.128", text)),
        stores=len(re.findall(r"\bSTG\.E", text)),
        wide_stores=len(re.findall(r"\bSTG\.E\S*\.128", text)),
        slots=sum(loop.values()) / entry.each,
        dots=len(re.findall(r"\b(?:HGMMA|HMMA|IMMA)\b", text)),
        loop=dict(loop.most_common(8)),
    )


def _amd(found: Any, entry: Entry) -> Code:
    text = found.asm["amdgcn"]

    def count(key: str) -> int:
        match = re.search(rf"\.{key}:\s+(\d+)", text)
        assert match is not None, key
        return int(match[1])

    return Code(
        registers=count("vgpr_count"),
        stack=count("private_segment_fixed_size"),
        spills=count("vgpr_spill_count") + count("sgpr_spill_count"),
        shared=found.metadata.shared,
        loads=len(re.findall(r"\b(?:global|buffer)_load_", text)),
        wide_loads=len(re.findall(r"\b(?:global|buffer)_load_dwordx4", text)),
        stores=len(re.findall(r"\b(?:global|buffer)_store_", text)),
        wide_stores=len(re.findall(r"\b(?:global|buffer)_store_dwordx4", text)),
        slots=0.0,
        dots=text.count("v_mfma_"),
        loop={},
    )


def _tool(name: str, *arguments: str) -> str:
    command = [os.fspath(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _hot(text: str) -> collections.Counter[str]:
    """The instructions of the longest loop that loads; of the whole kernel if none does.

    What follows the last EXIT is padding and is not counted.
    """
    labels: dict[str, int] = {}
    names: list[str] = []
    best: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        if found := INSTRUCTION.search(line):
            names.append(found[1])
            to = re.search(r"(\.L_x_\d+)", found[3])
            if found[1] == "BRA" and to and to[1] in labels:
                body = names[labels[to[1]] :]
                if {"LDG", "LDGSTS", "HMMA", "HGMMA", "IMMA"} & set(body) and len(body) > len(best):
                    best = body
    if not best:
        last = max(i for i, name in enumerate(names) if name == "EXIT")
        best = names[: last + 1]
    return collections.Counter(name for name in best if name != "NOP")
