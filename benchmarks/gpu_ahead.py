"""One process that compiles kernels for a GPU that it need not see, by the launchers' own code.

    python -m benchmarks.gpu_ahead '{"target": "sm_80", ...}' < units

It reads a unit a line, and answers each with a line of JSON. A unit is ``sample NAME`` (what
``kernels.verify`` runs), ``case FAMILY N`` (what the benchmark times, with the Nth configuration of
each kernel that is tuned) or ``decode KIND``. Sizes are those of the benchmark, but nothing is
computed: operations on large tensors give memory that nobody touches, a launch ends when it is
compiled, and what it was compiled to lies in Triton's cache, where the run on the GPU finds it.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

__all__ = ["Shapes", "units"]

LARGE = 1 << 16  # elements


class Shapes(TorchDispatchMode):
    """Operations on large tensors are not computed: their results have a shape, and any values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from zfunc.kernels.operators import NAMESPACE, RUNS

        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            with self:
                return RUNS[func.name()](*args, **kwargs)
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        factory = not given and any(x.name == "device" for x in func._schema.arguments)
        if func.is_view or (not factory and all(x.numel() <= LARGE for x in given)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        place = {"device": "meta"} if factory else {}
        made = func(*_on_meta(args), **_on_meta(kwargs) | place)
        if factory and all(x.numel() <= LARGE for x in tree_iter(made)):
            return func(*args, **kwargs)
        return tree_map_only(
            Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype), made
        )


def _on_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to("meta"), tree)


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(given: dict[str, Any]) -> list[dict[str, Any]]:
    """From here on launches only compile, for the GPU ``given``; what they gave is in the list."""
    if given["amd"]:
        torch.version.hip = "of a GPU elsewhere"  # before zfunc looks
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from zfunc.kernels import devices, dispatch

    devices.NONE = devices.Gpu(given["name"], given["target"], given["processors"])
    target = GPUTarget("hip" if given["amd"] else "cuda", given["arch"], 64 if given["amd"] else 32)
    triton.runtime.driver.set_active(Driver(target))
    found: list[dict[str, Any]] = []
    jit = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        made = jit(self, *args, grid=grid, warmup=True, **how)
        if made is not None:
            spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", str(made.asm.get("amdgcn", "")))
            found.append({"kernel": made.name, "shared": made.metadata.shared,
                          "spills": int(spills[1]) if spills else 0})  # fmt: skip
        return made

    def launch(name: str, *args: Any, **how: Any) -> None:
        kernel = dispatch.KERNELS[name]
        tensors = dispatch.tensors_of(args)
        takes = all(x.dtype in kernel.dtypes for x in tensors) and not kernel.limit(**how)
        if takes and dispatch.forced() != "torch":
            dispatch.launcher(name)(*args, **how)

    JITFunction.run = run
    dispatch.run = launch
    return found


def units(kernels: list[str], families: list[str], tuned: int, kinds: list[str]) -> Iterator[str]:
    """The units of a run, those that take longest first."""
    for family in families:
        yield from (f"case {family} {i}" for i in range(tuned if family != "layers" else 1))
    yield from (f"decode {kind}" for kind in kinds)
    yield from (f"sample {name}" for name in kernels)


def compile_unit(unit: str) -> None:
    """Launch what the unit says."""
    kind, name, *rest = unit.split()
    cpu = torch.device("cpu")
    if kind == "sample":
        from benchmarks.gpu_checks import SEEDS
        from zfunc.kernels.verification import SAMPLES

        for seed in range(SEEDS):  # other lengths are other kernels
            SAMPLES[name](torch.Generator().manual_seed(seed), cpu)()
        return
    from benchmarks.gpu import CASES
    from benchmarks.gpu_cases import Size
    from benchmarks.gpu_decode import decoder
    from benchmarks.gpu_tuning import candidates
    from zfunc.kernels import dispatch

    if kind == "decode":
        for rows in (1, 8):
            model = decoder(name, replace(Size(), layers=1), rows, cpu)
            model.fused(torch.randn(rows, Size.width).bfloat16())
        return
    turn, table = int(rest[0]), dispatch.table(cpu)
    for case in CASES[name](Size(), cpu):
        kept = table[case.kernel]
        how = next(islice(candidates(case.kernel, kept), turn, None), None)
        if how is None or (turn and not case.tune):
            continue
        table[case.kernel] = how
        try:
            case.ours(0)
        finally:
            table[case.kernel] = kept


def main() -> None:
    given = json.loads(sys.argv[1])
    found = compile_only(given)
    for line in sys.stdin:
        found.clear()
        answer: dict[str, Any] = {"unit": line.strip()}
        try:
            with Shapes():
                compile_unit(line.strip())
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"[:500]
            print(traceback.format_exc(), file=sys.stderr)
        print(json.dumps(answer | {"kernels": found}), flush=True)


if __name__ == "__main__":
    main()
