"""Compile a Triton kernel with no GPU at hand, and read what its machine code says.

Registers, stack and spills come from ``cuobjdump``, instructions from ``nvdisasm``; both are in
Triton's wheel. For AMD the assembly that the compiler leaves behind says the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from benchmarks.gpu_targets import TARGETS
from tests.kernels import hot_loop

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LANES = (32, 64)  # of a warp, and of a wave
# Registers of a processor: the warps of one program share them.
REGISTERS = {False: 65536, True: 4 * 512 * 64}


@dataclass(frozen=True)
class Entry:
    """One kernel as it is launched.

    Attributes:
        name: of the row in the table.
        kernel: the jitted function.
        signature: the type of each argument that is no constant: ``"*bf16"``, ``"i32"``.
        constants: the others.
        each: elements of the main buffer that one thread handles in the hot loop.
        bytes: that move for each of them.
        divisible: integers that are multiples of 16 at a launch.
        narrow: loads that may be shorter than 16 bytes: scalars, and buffers whose part in
            the traffic is small (signs).
        narrow_stores: likewise.
        options: ``num_warps``, ``num_stages``.
        dots: whether tensor cores are to do the products.
        tiny: what it reads is little and in the cache, so that only its fit is checked.
        others: the entries for targets where it is launched otherwise.
        wide: whether there must be a load or a store of 16 bytes.
        share: of :data:`tests.kernels.hot_loop.SLOTS_PER_BYTE` that the hot loop may take.
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
    others: dict[str, Entry] = field(default_factory=dict)
    wide: bool = True
    share: float = 0.75

    def on(self, target: str) -> Entry:
        """The entry as it is launched there."""
        return self.others.get(target, self)


@dataclass(frozen=True)
class Code:
    """What was found: ``slots`` are those that the hot loop takes for each element, ``dots`` the
    instructions in the whole kernel that multiply tiles."""

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


def for_each(launched: Callable[[str], Entry]) -> Entry:
    """An entry and its ``others``, from a function of the target."""
    return replace(launched("sm_90"), others={name: launched(name) for name in TARGETS})


def compiled(entry: Entry, target: str, *, large: bool = False) -> Code:
    """Compile for one of :data:`TARGETS`, where ``large`` tensors have 2 GiB or more.

    On AMD's loads of smaller ones are of another kind: of a buffer and an offset of 32 bits.
    """
    entry, amd = entry.on(target), TARGETS[target].amd
    names = entry.kernel.arg_names
    signature = {k: "constexpr" if k in entry.constants else entry.signature[k] for k in names}
    known: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, k in enumerate(names):
        pointer = signature[k].startswith("*")
        if pointer or k in entry.divisible:
            known[(i,)] = [["tt.divisibility", 16]]
        if pointer and amd and not large:
            known[(i,)].append(["tt.pointer_range", 32])
    source = ASTSource(
        fn=entry.kernel, signature=signature, constexprs=entry.constants, attrs=known
    )
    found = triton.compile(source, target=TARGETS[target].gpu, options=dict(entry.options))
    return _amd(found, entry) if amd else _nvidia(found, entry)


def built(entry: Entry, *ones: str) -> None:
    """Build the kernel as it is launched where sizes are special.

    Args:
        entry: the kernel.
        ones: integers that are 1, which a launch makes constants. Without any, all are of 64 bits.
    """
    wide = {k: "i64" if kind == "i32" and not ones else kind for k, kind in entry.signature.items()}
    constants = entry.constants | dict.fromkeys(ones, 1)
    signature = {k: "constexpr" if k in constants else wide[k] for k in entry.kernel.arg_names}
    source = ASTSource(fn=entry.kernel, signature=signature, constexprs=constants, attrs={})
    target = TARGETS["sm_90"].gpu
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
    slots, loop = hot_loop.nvidia(text)
    return Code(
        registers=int(registers[1]),
        stack=int(registers[2]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        shared=found.metadata.shared,
        loads=len(re.findall(r"\bLDG(?:STS)?\.E", text)),
        wide_loads=len(re.findall(r"\bLDG(?:STS)?\.E\S*\.128", text)),
        stores=len(re.findall(r"\bSTG\.E", text)),
        wide_stores=len(re.findall(r"\bSTG\.E\S*\.128", text)),
        slots=slots / entry.each,
        dots=len(re.findall(r"\b(?:HGMMA|HMMA|IMMA|UTC\w*MMA)\b", text)),
        loop=dict(loop.most_common(8)),
    )


def _amd(found: Any, entry: Entry) -> Code:
    text = found.asm["amdgcn"]
    slots, loop = hot_loop.amd(text)

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
        slots=slots / entry.each,
        dots=text.count("v_mfma_"),
        loop=dict(loop.most_common(8)),
    )


def _tool(name: str, *arguments: str) -> str:
    command = [os.fspath(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
