"""``zfunc doctor``: what is installed, which devices there are, which kernels run where and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from zfunc import __version__, kernels
from zfunc.commands.report import si
from zfunc.kernels import dispatch, panels
from zfunc.kernels.verification import verify_interpreted

__all__ = ["add_doctor", "facts", "report"]

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "optree", "safetensors", "transformers")
PRODUCTS = "low-bit products"


def add_doctor(commands: Any) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "doctor",
        help="say what is installed, and which kernels run where",
        description="What is installed, which devices there are, and for each kernel whether "
        "Triton or its twin in torch runs there, and why. The exit status is 1 if --verify finds "
        "a kernel that is wrong.",
    )
    command.add_argument("--verify", help="run kernels beside their twins", action="store_true")
    command.add_argument("--json", help="write it as JSON instead", action="store_true")
    command.set_defaults(command=_doctor_command)


def _doctor_command(found: argparse.Namespace) -> int:
    if found.json:
        print(json.dumps(facts(), indent=1))
        return 0
    lines = list(report(found.verify))
    print("\n".join(lines))
    return int(any(line.startswith("verify") and "WRONG" in line for line in lines))


def facts() -> dict[str, Any]:
    """What ``zfunc doctor --json`` writes: versions, backends, devices with their memory in bytes
    and what each kernel runs as there, and the variables ``ZFUNC_*`` that are set.

    >>> facts()["devices"][0]["device"]
    'cpu'
    """
    backends = []
    if dist.is_available():
        there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        backends = [name for name, present in there.items() if present]
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "zfunc": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": backends,
        "devices": [_device(device) for device in (torch.device("cpu"), *gpus)],
        "environment": {k: v for k, v in os.environ.items() if k.startswith("ZFUNC_")},
    }


def _device(device: torch.device) -> dict[str, Any]:
    free, total = _memory(device)
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    routes = {name: str(kernels.choose(name, empty)) for name in dispatch.KERNELS}
    found = {"device": str(device), "name": _name(device), "free": free, "memory": total}
    return {**found, "kernels": routes}


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, and in all."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def report(verify: bool = False) -> Iterator[str]:
    """The lines that ``zfunc doctor`` prints.

    Args:
        verify: also run each kernel beside its twin: on the GPU, or what stands for it.

    >>> next(iter(report())).startswith("zfunc")
    True
    """
    found = facts()
    yield f"zfunc {found['zfunc']} on Python {found['python']}, {found['platform']}"
    versions = found["packages"]
    yield "installed: " + ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    if missing := [name for name, v in versions.items() if not v]:
        yield "not installed: " + ", ".join(missing)
    yield "backends of torch.distributed: " + (", ".join(found["backends"]) or "none")
    if found["environment"]:
        yield "set: " + ", ".join(f"{k}={v}" for k, v in found["environment"].items())
    for device in found["devices"]:
        memory = f"{si(device['free'])}B of {si(device['memory'])}B free"
        yield f"{device['device']} ({device['name']}, {memory})"
        for name, choice in device["kernels"].items():
            yield f"  {name:18s} {choice}; moves {dispatch.KERNELS[name].traffic}"
        if device["device"] == "cpu":
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
