"""The choice of the code that runs: a Triton kernel, machine code, or the twin in torch.

Every kernel is registered here with its twin. Tensors on a GPU go to Triton if it is installed and
takes their dtypes. Tensors on a CPU go to machine code that LLVM makes in memory, if the kernel has
some for this CPU. All others go to the twin. :func:`choose` says where a call goes, and why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import threading
import typing
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from zfunc.kernels.devices import AMD, gpu
from zfunc.kernels.llvm import host, say_missing
from zfunc.kernels.operators import KernelError
from zfunc.trees.kinds import FORESEEN, kind

__all__ = [
    "AMD",
    "KERNELS",
    "Choice",
    "Kernel",
    "any_float",
    "choose",
    "config",
    "forced",
    "in_float32",
    "known",
    "register",
    "run",
    "steady",
    "tensors_of",
    "use",
]

Route = Literal["triton", "llvm", "torch"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = (*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64)
BYTES = (torch.uint8, torch.int8)
KNOWN = (*FLOATS, *BYTES)  # to machine code

# Triton's interpreter keeps the program that it is at in a global: one launch at a time.
_interpreter = threading.RLock()
_forced: ContextVar[Route | None] = ContextVar("kernels_route", default=None)

Instead = Callable[[str, list[Tensor], Callable[[], None]], None]
INSTEAD: ContextVar[Instead | None] = ContextVar("kernels_instead", default=None)
"""Called in the place of a kernel where a step is foreseen: its name, its tensors and its twin."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, its twin and its machine code: the same arguments, the same buffers written.

    Attributes:
        name: what it is called.
        twin: plain torch, runs anywhere.
        launch: the Triton launcher, as ``module:function``; imported when first needed.
        traffic: bytes that must move, an element of the main buffer, as text.
        dtypes: what the launcher takes; float64 and others go to the twin.
        limit: of the keyword arguments, why Triton cannot do it; ``None`` if it can.
        machine: the launcher for CPUs, likewise; ``""`` where there is none.
        machine_limit: of the tensors and the keyword arguments, why that cannot do it.
    """

    name: str
    twin: Callable[..., None]
    launch: str
    traffic: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    limit: Callable[..., str | None] = lambda **how: None
    machine: str = ""
    machine_limit: Callable[..., str | None] = lambda *tensors, **how: None


@dataclass(frozen=True)
class Choice:
    """Where a call goes, and why.

    >>> print(Choice("torch", "tensors are on cpu"))
    torch: tensors are on cpu
    """

    route: Route
    why: str

    def __str__(self) -> str:
        return f"{self.route}: {self.why}"


KERNELS: dict[str, Kernel] = {}


def register(
    name: str,
    twin: Callable[..., None],
    file: str,
    traffic: str,
    *,
    machine: Callable[..., str | None] | None = None,
    **rest: Any,
) -> None:
    """Add a kernel to the table. Its launchers have its name.

    Args:
        name, twin, traffic, rest: see :class:`Kernel`.
        file: where the Triton launcher is, such as ``"onebit_triton"``; that of machine code, if
            there is some, is in ``"onebit_llvm"``.
        machine: the ``machine_limit`` of machine code.
    """
    if machine is not None:
        place = f"zfunc.kernels.{file.replace('_triton', '_llvm')}:{name}"
        rest |= {"machine": place, "machine_limit": machine}
    KERNELS[name] = Kernel(name, twin, f"zfunc.kernels.{file}:{name}", traffic, **rest)


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported (there is none for macOS or Windows)."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton was asked to interpret: then its kernels take CPU tensors, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def forced() -> Route | None:
    """The route that :func:`use` insists on, if there is one."""
    return _forced.get()


def choose(name: str, *tensors: Tensor | None, **how: Any) -> Choice:
    """Which code a call of kernel ``name`` with these tensors runs, and why.

    Args:
        name: a key of :data:`KERNELS`.
        tensors: its arguments.
        how: its keywords that can matter, such as ``size``.

    Returns:
        The route, and the reason in words.

    Raises:
        KernelError: there is no such kernel or no tensor, or :func:`use` asks for Triton or LLVM
            where it cannot run.

    >>> print(choose("rms_norm", torch.ones(3)))
    torch: tensors are on cpu
    """
    if name not in KERNELS:
        raise KernelError(
            f"kernels.choose: no kernel {name!r}; expected one of {', '.join(KERNELS)}."
        )
    kernel, forced = KERNELS[name], _forced.get()
    present = [x for x in tensors if x is not None]
    if not present:
        raise KernelError(f"kernels.choose: {name} of no tensors; expected at least one.")
    if forced == "torch":
        return Choice("torch", "asked for by kernels.use")
    where = f"tensors are on {present[0].device.type}"
    machine = bool(kernel.machine) and forced != "triton" and _on_cpu(present)
    route: Route = "llvm" if machine else "triton"
    obstacle = (_lacking if machine else _obstacle)(kernel, present, how)
    if obstacle is None and forced in (None, route):
        return Choice(route, f"{where}: {host().isa}, through LLVM" if machine else where)
    if forced == "triton" and interpreting() and str(obstacle).endswith("on cpu"):
        return Choice("triton", "the interpreter")
    if forced is not None:
        lacks = obstacle or where
        if forced == "llvm" and not kernel.machine:
            some = ", ".join(x.name for x in KERNELS.values() if x.machine)
            lacks = f"there is no machine code for it, but for {some}"
        raise KernelError(f'kernels.{name} under kernels.use("{forced}"): {lacks}.')
    return Choice("torch", str(obstacle))


def _lacking(kernel: Kernel, tensors: list[Tensor], how: dict[str, Any]) -> str | None:
    """Why machine code cannot take these tensors of a CPU; ``None`` if it can."""
    lacks = kernel.machine_limit(*tensors, **how)
    if lacks is None and not host().isa:
        say_missing()
        lacks = host().why
    return None if lacks is None else f"tensors are on cpu, and for machine code: {lacks}"


def _obstacle(kernel: Kernel, tensors: list[Tensor], how: dict[str, Any]) -> str | None:
    """Why Triton cannot take these tensors; ``None`` if it can."""
    if not installed() and not FORESEEN.get():
        return "Triton is not installed"
    for x in tensors:
        if x.dtype not in kernel.dtypes:
            return f"its Triton kernel does not take {x.dtype}"
    if how and (reason := kernel.limit(**how)):
        return reason
    return None if kind(tensors[0].device) == "cuda" else f"tensors are on {tensors[0].device.type}"


def _on_cpu(tensors: list[Tensor]) -> bool:
    return all(kind(x.device) == "cpu" for x in tensors)


def in_float32(*tensors: Tensor, **how: Any) -> str | None:
    """A ``machine_limit``: what follows the first tensor is float32, or bytes.

    >>> in_float32(torch.ones(1), torch.ones(1, dtype=torch.float64))
    'it keeps errors, scales and moments in float32, not torch.float64'
    """
    for x in tensors[1:]:
        if x.dtype not in (torch.float32, *BYTES):
            return f"it keeps errors, scales and moments in float32, not {x.dtype}"
    return known(*tensors)


def any_float(*tensors: Tensor, **how: Any) -> str | None:
    """A ``machine_limit``: :func:`in_float32`, but the last is a result of any floating dtype."""
    for x in tensors[2:][-1:]:
        if x.dtype not in FLOATS:
            return f"it writes no {x.dtype}"
    return in_float32(*tensors[:2], *tensors[2:-1])


def known(*tensors: Tensor, **how: Any) -> str | None:
    """A ``machine_limit``: every dtype is one that such code reads and writes."""
    return next((f"it takes no {x.dtype}" for x in tensors if x.dtype not in KNOWN), None)


@contextlib.contextmanager
def use(route: Route | None) -> Iterator[None]:
    """Insist on one route within the block; ``None`` gives the choice back to the dispatch.

    Gradients of what was computed in the block take the same route, wherever they are asked for.
    Where ``"llvm"`` has no code for a kernel, its call raises, as ``"triton"`` does on a CPU.

    Args:
        route: ``"triton"``, ``"llvm"``, ``"torch"`` or ``None``.

    Raises:
        KernelError: it is something else.

    >>> with use("torch"):
    ...     print(choose("adamw_flat", torch.ones(3)))
    torch: asked for by kernels.use
    """
    if route not in (None, *typing.get_args(Route)):
        raise KernelError(
            f'kernels.use: {route!r} is no route; expected "triton", "llvm", "torch" or None.'
        )
    token = _forced.set(route)
    try:
        yield
    finally:
        _forced.reset(token)


F = TypeVar("F", bound=type[torch.autograd.Function])


def steady(function: F) -> F:
    """A class decorator: the backward of this Function takes the route that its forward was given.

    On a GPU autograd runs it in a thread of its own, which knows nothing of :func:`use`.
    """
    plain: Any = function
    setup_context, backward = plain.setup_context, plain.backward

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.route = _forced.get()

    def steady_backward(ctx: Any, *grads: Any) -> Any:
        if ctx.route is None:
            return backward(ctx, *grads)
        with use(ctx.route):
            return backward(ctx, *grads)

    plain.setup_context, plain.backward = staticmethod(setup), staticmethod(steady_backward)
    return function


def run(name: str, *args: Any, **kw: Any) -> None:
    """Call a kernel, or its twin: whichever :func:`choose` says of the positional arguments."""
    kernel, tensors = KERNELS[name], tensors_of(args)
    route = choose(name, *tensors, **kw).route
    if route == "torch":
        kernel.twin(*args, **kw)
        return
    if (instead := INSTEAD.get()) is not None:
        instead(name, tensors, lambda: kernel.twin(*args, **kw))
        return
    if route == "llvm":
        _imported(kernel.machine)(*args, **kw)
        return
    with torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else _interpreter:
        launcher(name)(*args, **kw)


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, those of their tuples included."""
    found: list[Tensor] = []
    for x in args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple):
            found += [t for t in x if isinstance(t, Tensor)]
    return found


def launcher(name: str) -> Callable[..., None]:
    """The function that launches a Triton kernel; imports Triton."""
    return _imported(KERNELS[name].launch)


def _imported(place: str) -> Callable[..., None]:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


@functools.cache
def tables(gpu: str, target: str = "") -> dict[str, dict[str, int]]:
    """Launch configurations: those for any GPU, over them those for AMD's, whose 64 lanes are
    two warps, those for an architecture, and those tuned for this one.

    Args:
        gpu: its name as torch gives it; ``""`` for none.
        target: its architecture, such as ``"sm_90"``.
    """
    folder = Path(__file__).parent / "configs"
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    amd = AMD or slug.startswith("amd") or target.startswith("gfx")
    merged: dict[str, dict[str, int]] = {}
    for name in ["default", *["amd"] * amd, target, slug]:
        if name and (folder / f"{name}.json").exists():
            merged.update(json.loads((folder / f"{name}.json").read_text()))
    return merged


def config(
    name: str, device: torch.device | None = None, *, target: str | None = None
) -> dict[str, int]:
    """How a kernel is launched: its block sizes, ``num_warps``, ``num_stages``.

    ``PROGRAMS`` are those for each processor of the GPU.

    Args:
        name: of the kernel.
        device: a GPU whose own table is read, if it has one.
        target: an architecture, in place of a device.

    >>> config("adamw_flat")["num_warps"]
    4
    """
    return (table(device) if target is None else tables("", target))[name]


def table(device: torch.device | None) -> dict[str, dict[str, int]]:
    """The configurations in force on a device: who changes one changes how it is launched."""
    on = gpu(device)
    return tables(on.name, on.target)
