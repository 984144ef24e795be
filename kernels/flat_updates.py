"""Elementwise optimizer updates over flat buffers: what all of them share.

An optimizer gives its formula as a twin and as a Triton kernel. Two operators follow: ``name``
returns fresh buffers and has a rule for ``vmap``; ``name_`` overwrites what it is given. Both can
write a copy of the new parameters in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfunc.buffers.uploads import on_device
from zfunc.kernels import dispatch
from zfunc.kernels.operators import (
    BatchRule,
    KernelError,
    agree,
    apart,
    contiguous,
    copies,
    define,
    dense,
    folded,
    nothing,
    numbers,
    undifferentiated,
)

__all__ = ["BLOCK", "Buffers", "FlatUpdate", "blocks", "check_hyper", "hyper_tensor"]

BLOCK = 64
CHUNK = 1 << 18  # a float32 gradient of 1 MiB stays in the caches of today's CPUs

Number = float | Tensor
Buffers = tuple[Any, ...]  # tensors, or None where one may be absent


def hyper_tensor(
    row: Callable[[Callable[[Number], Any]], Sequence[Number]],
    inputs: Sequence[Number],
    device: torch.device | str | None,
) -> Tensor:
    """Hyperparameters as one float64 tensor on a device, without waiting for the device.

    What the host knows travels in one copy; what a device knows stays there. While a CUDA graph
    is captured, numbers of the host are what they are in every replay, and are filled in.

    Args:
        row: gives the numbers; it gets a function that makes a number fit for arithmetic.
        inputs: those that may be 0-d tensors, on the host or on the device.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if any(_symbolic(x) for x in tensors):
        return torch.stack([torch.as_tensor(x).double() for x in row(_wide)])
    there = next((x.device for x in tensors if x.device.type != "cpu"), None)
    goal = torch.device(device) if device is not None else there
    values = row(_wide)
    here = [0.0 if isinstance(x, Tensor) and x.device.type != "cpu" else float(x) for x in values]
    if goal is not None and goal.type == "cuda" and _capturing():
        made = torch.empty(len(here), dtype=torch.float64, device=goal)
        for i, number in enumerate(here):
            made[i].fill_(number)
    else:
        made = on_device(torch.tensor(here, dtype=torch.float64, device="cpu"), goal)
    for i, x in enumerate(values):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            made[i].copy_(x)
    return made


def check_hyper(name: str, hyper: Tensor, labels: tuple[str, ...]) -> None:
    """Refuse the hyperparameters of another optimizer.

    Raises:
        KernelError: so they are.
    """
    if hyper.shape != (len(labels),) or hyper.dtype != torch.float64:
        raise KernelError(
            f"kernels.{name}: hyper is {hyper.dtype}{list(hyper.shape)}; expected "
            f"float64[{len(labels)}]: {', '.join(labels)}."
        )


def _wide(x: Number) -> Any:
    return x.double() if isinstance(x, Tensor) else x


def _symbolic(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _capturing() -> bool:
    """Whether what is launched goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class FlatUpdate:
    """An elementwise optimizer step over flat buffers, as two operators.

    Attributes:
        name: of the kernel and of the functional operator.
        state: the names of the buffers that it renews, the parameters first; with a ``?`` behind
            those that may be absent.
        hyper: the names of the hyperparameters, in order.
        instead: what to write where a gradient through the step is wanted.
    """

    name: str
    state: tuple[str, ...]
    hyper: tuple[str, ...]
    instead: str

    def define(self) -> tuple[Callable[..., Any], Callable[..., None]]:
        """The operators ``(grad, *state, hyper, dtype of low)``, ``(grad, *state, low, hyper)``."""
        parts = [(label.rstrip("?"), "?" * label.endswith("?")) for label in self.state]
        olds = ", ".join(f"Tensor{absent} {label}" for label, absent in parts)
        news = ", ".join(["Tensor"] * (len(self.state) + 1))
        donated = ", ".join(f"Tensor({label}!){absent} {label}" for label, absent in parts)
        fresh = define(
            f"{self.name}(Tensor grad, {olds}, Tensor hyper, ScalarType? low) -> ({news})",
            self._fresh,
            lambda grad, *rest: self._room(*rest),
            self.rule(),
            lambda grad, *rest: self.fits(grad, rest[:-2], *rest[-2:]),
        )
        inplace = define(
            f"{self.name}_(Tensor grad, {donated}, Tensor(low!)? low, Tensor hyper) -> ()",
            self._inplace,
            nothing,
            check=lambda grad, *rest: self._fits_donated(grad, rest[:-2], *rest[-2:]),
        )
        return fresh, inplace

    def undifferentiated(self, grad: Tensor, *rest: Tensor) -> None:
        """Refuse tensors whose gradient is asked for, which the operators cannot see.

        Raises:
            KernelError: gradients are being recorded.
        """
        undifferentiated(self.name, self.instead, grad, *rest)

    def rule(self) -> BatchRule:
        """The rule for ``vmap``; elements are independent unless a subclass says otherwise."""
        return folded(1 + len(self.state))

    def named(self, state: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """Buffers by name."""
        return {label.rstrip("?"): x for label, x in zip(self.state, state, strict=True)}

    def fits(
        self, grad: Tensor, state: Sequence[Tensor], hyper: Tensor, low: torch.dtype | None
    ) -> None:
        """Refuse what the operators cannot take.

        Raises:
            KernelError: shapes, dtypes or devices differ, or ``hyper`` is of another optimizer.
        """
        buffers = dict(zip(self.state, state, strict=True))
        agree(self.name, grad=grad, **buffers)
        dtypes = {label: x.dtype for label, x in buffers.items()}
        if not numbers(grad, *state):
            raise KernelError(
                f"kernels.{self.name}: grad is {grad.dtype}, {dtypes}; expected floating-point "
                "numbers of 16 bits or more."
            )
        if len(set(dtypes.values())) > 1:
            raise KernelError(
                f"kernels.{self.name}: {dtypes}; expected one dtype for parameters and moments."
            )
        check_hyper(self.name, hyper, self.hyper)

    def _fits_donated(
        self, grad: Tensor, state: Sequence[Tensor], low: Tensor | None, hyper: Tensor
    ) -> None:
        """:meth:`fits`, and what is updated where it lies is contiguous."""
        self.fits(grad, state, hyper, None)
        agree(self.name, param=state[0], low=low)
        copies(self.name, low)
        dense(self.name, low=low, **self.named(state))

    def _fresh(self, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *state, hyper, low = rest
        made = self._room(*rest)
        asked = zip((*state, low), made, strict=True)
        *new, copy = (None if x is None else y for x, y in asked)
        grad, *old = contiguous(grad, *state)
        dispatch.run(self.name, grad, tuple(old), tuple(new), copy, hyper=hyper)
        return made

    def _room(self, *rest: Any) -> tuple[Tensor, ...]:
        """Fresh buffers for the results; what is absent is empty, with the batch of ``vmap``."""
        *state, _, low = rest
        first, kind = state[0], torch.contiguous_format
        copy = None if low is None else first
        return tuple(
            first.new_empty((*first.shape[:-1], 0), dtype=dtype)
            if x is None
            else torch.empty_like(x, dtype=dtype, memory_format=kind)
            for x, dtype in (*((x, None) for x in state), (copy, low))
        )

    def _inplace(self, grad: Tensor, *rest: Any) -> None:
        *state, low, hyper = rest
        grad = grad.contiguous()
        written = {"low": low, **self.named(state)}
        # An element may take the place of its gradient, which is read before; not another's.
        place = (grad.data_ptr(), grad.itemsize)
        over = any(x is not None and (x.data_ptr(), x.itemsize) == place for x in written.values())
        apart(self.name, grad=None if over else grad, **written)
        dispatch.run(self.name, grad, tuple(state), tuple(state), low, hyper=hyper)


def blocks(
    grad: Tensor, state: Sequence[Tensor], new: Sequence[Tensor], low: Tensor | None, factor: float
) -> Iterator[list[Tensor]]:
    """Renew buffers a block at a time, each while it is in the cache.

    The consumer updates what it is given, in place; then the 16-bit copy is made. Blocks are
    multiples of 64 elements and the end is padded, because the vectorised loops of torch round
    the last elements of a buffer in another way: a cut at such a multiple changes no bit.

    Args:
        grad, state, new, low: contiguous, of one size; ``new`` may be ``state``.
        factor: multiplies the gradients.

    Yields:
        ``[gradient in the dtype of the state, *state]``.
    """
    old = [x.view(-1) for x in state]
    after = [x.view(-1) for x in new]
    g, copy = grad.view(-1), None if low is None else low.view(-1)
    n = g.numel()
    scratch = old[0].new_empty(min(CHUNK, n + -n % BLOCK))
    whole = n - n % BLOCK
    for a in range(0, whole, CHUNK):
        b = min(a + CHUNK, whole)
        for source, target in zip(old, after, strict=True):
            if source.data_ptr() != target.data_ptr():
                target[a:b].copy_(source[a:b])
        yield [_scaled(scratch[: b - a], g[a:b], factor), *(x[a:b] for x in after)]
        if copy is not None:
            copy[a:b].copy_(after[0][a:b])
    if whole < n:
        pad = (0, BLOCK - n % BLOCK)
        ends = [torch.nn.functional.pad(x[whole:], pad) for x in (g, *old)]
        yield [_scaled(scratch[:BLOCK], ends[0], factor), *ends[1:]]
        for target, end in zip(after, ends[1:], strict=True):
            target[whole:].copy_(end[: n - whole])
        if copy is not None:
            copy[whole:].copy_(after[0][whole:])


def _scaled(out: Tensor, grad: Tensor, factor: float) -> Tensor:
    out.copy_(grad)
    return out if factor == 1 else out.mul_(factor)
