"""Triton's launchers: their Python runs and is checked, and the torch twin gives the numbers.

``kernels.choose`` decides as for a GPU. Where it says Triton, the launcher runs up to
``kernel[grid](...)``; there the arguments are checked as Triton would bind them, and written
down. What the kernel would write, its twin has written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["launched", "watched"]

LIMITS = (2**31 - 1, 65535, 65535)  # of a grid, by axis


def watched(cuda: Cuda, real: Callable[[str], Callable[..., None]]) -> Callable[..., Any]:
    """``dispatch.launcher``: the launcher runs, and the twin beside it."""

    def launcher(name: str) -> Callable[..., None]:
        from zfunc.kernels import dispatch

        launch, twin = real(name), dispatch.KERNELS[name].twin

        def both(*args: Any, **how: Any) -> None:
            given = dispatch.tensors_of((*args, *how.values()))
            if not any(cuda.on_gpu(x) for x in given):
                launch(*args, **how)
                return
            if cuda.recording is not None:
                cuda.recording.about_to_write([x for x in given if cuda.on_gpu(x)])
            with cuda.quietly(), _changes(cuda) as changed:
                twin(*args, **how)
            written = [x for x in given if x.untyped_storage()._cdata in changed]
            with cuda.quietly():
                right = [x.clone() for x in written]
            launch(*args, **how)
            if cuda.recording is not None:
                cuda.recording.other(lambda: twin(*args, **how))
            with cuda.quietly():  # what the launcher does with what no kernel has written
                for x, numbers in zip(written, right, strict=True):
                    x.copy_(numbers)
            where, ids = cuda.where(), {id(x) for x in written}
            for x in given:
                if cuda.on_gpu(x) and id(x) not in ids:
                    cuda.use(cuda.current, x, False, where, name)
            for x in written:
                cuda.use(cuda.current, x, True, where, name)

        return both

    return launcher


@contextlib.contextmanager
def _changes(cuda: Cuda) -> Iterator[set[int]]:
    before, cuda.thread.changed = cuda.thread.changed, set()
    try:
        yield cuda.thread.changed
    finally:
        cuda.thread.changed = before


def launched(cuda: Cuda, real: Callable[..., Any]) -> Callable[..., Any]:
    """``JITFunction.run``: checks what Triton would, and writes the launch down."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> Any:
        given = [x for x in (*args, *how.values()) if isinstance(x, Tensor)]
        if warmup or not any(cuda.on_gpu(x) for x in given):
            return real(kernel, *args, grid=grid, warmup=warmup, **how)
        bound = _bound(kernel, args, how)
        for label, x in bound.items():
            if isinstance(x, Tensor) and not cuda.on_gpu(x):
                cuda.mixed(
                    _name(kernel),
                    f"pointer argument {label} {tuple(x.shape)} cannot be accessed from Triton",
                )
        dims = _grid(_name(kernel), grid(bound) if callable(grid) else grid)
        if not cuda.thread.quiet:
            cuda.issue(
                _name(kernel),
                kind="kernel",
                grid=dims,
                nbytes=sum(x.nbytes for x in given),
                arguments=_described(cuda, bound),
            )
        return None

    return run


def _name(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def _bound(kernel: Any, args: tuple[Any, ...], how: dict[str, Any]) -> dict[str, Any]:
    options = {key: how.pop(key) for key in _options() if key in how}
    if (warps := options.get("num_warps", 4)) & (warps - 1) or not 1 <= warps <= 32:
        raise ValueError(f"{_name(kernel)}: num_warps={warps}; Triton takes a power of two")
    try:
        bound = _signature(kernel.fn).bind(*args, **how)
    except TypeError as error:
        raise TypeError(f"{_name(kernel)} is launched with other arguments: {error}") from None
    bound.apply_defaults()
    for label, x in bound.arguments.items():
        if not isinstance(x, Tensor | int | float | bool | str | None) and not hasattr(
            x, "primitive_bitwidth"
        ):
            raise TypeError(f"{_name(kernel)}: Triton takes no {type(x).__name__} for {label}")
    return dict(bound.arguments)


_signature = functools.cache(inspect.signature)


@functools.cache
def _options() -> tuple[str, ...]:
    """What a launch may say of how it is compiled."""
    from triton.backends.nvidia.compiler import CUDAOptions

    return tuple(CUDAOptions.__dataclass_fields__)


def _grid(name: str, grid: Any) -> tuple[int, ...]:
    dims = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
    for n, limit in zip(dims, LIMITS, strict=False):
        if not isinstance(n, int) or not 1 <= n <= limit:
            raise ValueError(f"{name}: grid {dims}; each of its sizes is from 1 to {LIMITS}")
    return dims


def _described(cuda: Cuda, bound: dict[str, Any]) -> tuple[Any, ...]:
    """Names with shapes, dtypes, contiguity and scalars; storages too, if those are kept."""
    kept = cuda.keeps_arguments
    return tuple(
        (label, *cuda._named(x))
        if isinstance(x, Tensor) and kept
        else (label, tuple(x.shape), str(x.dtype), str(x.device), x.is_contiguous())
        if isinstance(x, Tensor)
        else (label, x if isinstance(x, int | float | bool | str | None) else str(x))
        for label, x in bound.items()
    )
