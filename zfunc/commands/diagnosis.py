"""``zfunc doctor``: what is installed, which devices there are, which kernels run where and why."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import torch

from zfunc import kernels
from zfunc.kernels import dispatch, panels
from zfunc.kernels.verification import verify_interpreted

__all__ = ["devices", "report"]

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "optree", "safetensors", "transformers")
PRODUCTS = "low-bit products"


def devices() -> list[torch.device]:
    """The CPU, and every GPU."""
    return [
        torch.device("cpu"),
        *(torch.device("cuda", i) for i in range(torch.cuda.device_count())),
    ]


def report(verify: bool = False) -> Iterator[str]:
    """The lines that ``zfunc doctor`` prints.

    Args:
        verify: also run each kernel beside its twin: on the GPU, or what stands for it.

    >>> next(iter(report())).startswith("zfunc")
    True
    """
    found = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    yield f"zfunc on Python {platform.python_version()}, {platform.platform()}"
    yield "installed: " + ", ".join(found)
    missing = [name for name in PACKAGES if _version(name) is None]
    if missing:
        yield "not installed: " + ", ".join(missing)
    yield "backends of torch.distributed: " + (", ".join(_backends()) or "none")
    for device in devices():
        yield f"{device} ({_name(device)})"
        for name, kernel in dispatch.KERNELS.items():
            choice = kernels.choose(name, torch.empty(0, dtype=torch.bfloat16, device=device))
            yield f"  {name:18s} {choice}; moves {kernel.traffic}"
        if device.type == "cpu":
            where = panels.host()
            yield f"  {PRODUCTS:18s} {'llvm' if where.isa else 'torch'}: {where.why}"
            if where.lacks:
                slower = [PRODUCTS, *(x.name for x in dispatch.KERNELS.values() if x.machine)]
                yield f"slower on this CPU, since {where.why}: {', '.join(slower)}"
    if verify:
        yield from _verified()


def _verified() -> Iterator[str]:
    """What runs here beside its twin: on a GPU; without one machine code, and Triton's kernels in
    its interpreter. The last line says which of them was done."""
    gpu = torch.cuda.is_available()
    ran = [verdict for verdict in kernels.verify() if verdict.ran or gpu]
    for verdict in ran:
        yield f"verify {verdict}"
    right = sum(verdict.ran and verdict.right for verdict in ran)
    if gpu:
        yield f"verified on {_name(torch.device('cuda'))}: {right} of {len(ran)} kernels are right"
        return
    yield f"verified as machine code on this CPU: {right} of {len(ran)} kernels are right"
    try:
        interpreted = verify_interpreted()
    except kernels.KernelError as error:
        yield f"not verified: the kernels in Triton. {error}"
        return
    for verdict in interpreted:
        yield f"verify {verdict}"
    right = sum(verdict.ran and verdict.right for verdict in interpreted)
    yield (
        f"verified in Triton's interpreter, without a GPU: {right} of {len(interpreted)} kernels "
        "are right"
    )
    yield "nothing was compiled for a GPU or run on one: there is none here"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} thread(s)"


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, present in there.items() if present]
