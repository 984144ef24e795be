"""Copies between host and device: ``Tensor.to`` and its like, ``torch.tensor(device="cuda")``.

A copy that the host does not ask to be asynchronous ends in ``cudaStreamSynchronize``. One that it
does is asynchronous if the host's memory is page-locked; up from pageable memory the driver stages
it (beyond 64 KiB it may wait for the stream first), and down to pageable memory it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu.memory import real_device

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["methods", "noted"]

CPU = torch.device("cpu")
STAGED_AT_ONCE = 64 * 2**10


def noted(cuda: Cuda, into: Tensor, source: Tensor, *, blocking: bool, name: str) -> None:
    """A copy is issued on the current stream; the host waits for it or not."""
    up = cuda.on_gpu(into)
    if up and cuda.on_gpu(source):  # between places of the device
        cuda.issue("aten.copy_.default", [source], [into], arguments=cuda.named((into, source)))
        return
    host = source if up else into
    pinned = cuda.pinned(host)
    what = "up" if up else "down"
    reads = [source] if pinned or not up else []
    writes = [into] if pinned or up else []
    arguments = cuda.named((into, source))
    cuda.issue(what, reads, writes, kind="copy", nbytes=source.nbytes, arguments=arguments)
    if blocking:
        cuda.sync(f"{name}, a blocking copy {what}")
    elif not pinned and not up:
        cuda.sync(f"{name} down to pageable memory")
    elif not pinned:
        size = "a small" if source.nbytes <= STAGED_AT_ONCE else "a large"
        cuda.note("pageable", f"{name}, {size} copy up from pageable memory", nbytes=source.nbytes)


def move(
    cuda: Cuda, x: Tensor, goal: torch.device, dtype: torch.dtype, blocking: bool, name: str
) -> Tensor:
    """A copy of ``x`` on the other side, of a dtype."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Moved.apply(x, goal, dtype, blocking, name)  # type: ignore[no-any-return]
    if x.dtype != dtype:  # it changes on the side where the copy begins
        x = torch.ops.aten._to_copy.default(x, dtype=dtype)
    x = x.detach()
    with _disable_current_modes():
        out = torch.ops.aten.clone.default(x)
    if goal.type == "cuda":
        cuda.adopt(out, goal.index)
    noted(cuda, out, x, blocking=blocking, name=name)
    if cuda.recording is not None:
        cuda.recording.other(lambda: out.copy_(x) and None, (out,))
    return out


class _Moved(torch.autograd.Function):
    """A copy to the other side, whose gradient comes back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, goal: torch.device, dtype: torch.dtype, blocking: bool, name: str
    ) -> Tensor:
        from tests.gpu.cuda import active

        return move(active(), x.detach(), goal, dtype, blocking, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.back = inputs[0].device, inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        device, dtype = ctx.back
        return grad.to(device, dtype), None, None, None, None


def plain(x: object) -> bool:
    """Whether a tensor is no wrapper with functions of its own."""
    kind = type(x)
    known = _PLAIN.get(kind)
    if known is None:
        function: Any = getattr(kind, "__torch_function__", None)
        usual = (torch._C._disabled_torch_function_impl, Tensor.__torch_function__)
        _PLAIN[kind] = known = isinstance(x, Tensor) and any(
            getattr(function, "__func__", function) is getattr(f, "__func__", f) for f in usual
        )
    return known


_PLAIN: dict[type, bool] = {}


def methods(cuda: Cuda) -> dict[str, Any]:
    """What tensors answer, by the name of the attribute."""
    base: Any = torch._C.TensorBase

    def asked(x: Tensor, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        """Device and dtype that ``to(...)`` asks for, and the rest of it."""
        device, dtype, flags = how.get("device"), how.get("dtype"), []
        for arg in args:
            if isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, bool):
                flags.append(arg)
            elif isinstance(arg, int):
                device = torch.device("cuda", arg)
            elif isinstance(arg, str | torch.device):
                device = arg
        names = ("non_blocking", "copy")
        flag = {name: bool(how.get(name)) for name in names} | dict(zip(names, flags, strict=False))
        return None if device is None else torch.device(device), dtype, flag

    def to(x: Tensor, *args: Any, **how: Any) -> Tensor:
        if not plain(x):
            return base.to(x, *args, **how)  # type: ignore[no-any-return]
        device, dtype, flag = asked(x, args, how)
        here = x.device
        if device is None:
            return base.to(x, *args, **how)  # type: ignore[no-any-return]
        if "meta" in (device.type, here.type):
            return base.to(x, *args, **how)  # type: ignore[no-any-return]
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", cuda.device)
        dtype = x.dtype if dtype is None else dtype
        if device.type != here.type:
            return move(cuda, x, device, dtype, not flag["non_blocking"], "to")
        rest = {"memory_format": how["memory_format"]} if "memory_format" in how else {}
        return base.to(x, dtype, copy=flag["copy"], **rest)  # type: ignore[no-any-return]

    def to_cuda(x: Tensor, device: Any = None, non_blocking: bool = False, **how: Any) -> Tensor:
        if not plain(x):
            return base.cuda(x, device, non_blocking)  # type: ignore[no-any-return]
        return to(x, "cuda" if device is None else device, non_blocking=non_blocking)

    def to_cpu(x: Tensor, **how: Any) -> Tensor:
        return to(x, "cpu") if plain(x) else base.cpu(x, **how)

    def type_as(x: Tensor, other: Tensor) -> Tensor:
        return to(x, other)

    def pin_memory(x: Tensor, *args: Any) -> Tensor:
        if cuda.pinned(x):
            return x
        if cuda.on_gpu(x):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")
        return torch.empty_like(x, pin_memory=True).copy_(x)

    def record_stream(x: Tensor, stream: Any) -> None:
        if not cuda.on_gpu(x):
            raise RuntimeError("record_stream: expected a tensor of the GPU")
        found = cuda.find(x)
        assert found is not None
        found.kept.add(stream.name)
        cuda.note("kept", f"record_stream({stream.name})")

    def numpy(x: Tensor, *, force: bool = False) -> Any:
        if cuda.on_gpu(x):
            if not force:
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy "
                    "the tensor to host memory first."
                )
            return base.numpy(to(x.detach(), "cpu"))
        return base.numpy(x, force=force)

    def tolist(x: Tensor) -> Any:
        if cuda.on_gpu(x):
            cuda.sync("tolist")
            with cuda.quietly():
                return base.tolist(x)
        return base.tolist(x)

    def device(x: Tensor) -> torch.device:
        return cuda.device_of(x) if plain(x) else real_device(x)

    def is_cuda(x: Tensor) -> bool:
        return cuda.on_gpu(x) if plain(x) else base.is_cuda.__get__(x)

    def is_cpu(x: Tensor) -> bool:
        return device(x).type == "cpu" if plain(x) else base.is_cpu.__get__(x)

    def get_device(x: Tensor) -> int:
        found = device(x)
        return found.index if found.type == "cuda" else -1

    return {
        "to": to,
        "cuda": to_cuda,
        "cpu": to_cpu,
        "type_as": type_as,
        "pin_memory": pin_memory,
        "is_pinned": lambda x, *args: cuda.pinned(x) if plain(x) else base.is_pinned(x),
        "record_stream": record_stream,
        "numpy": numpy,
        "tolist": tolist,
        "get_device": get_device,
        "device": property(device),
        "is_cuda": property(is_cuda),
        "is_cpu": property(is_cpu),
    }


def makers(cuda: Cuda) -> dict[str, Callable[..., Any]]:
    """``torch.tensor`` and its like: their copies up end in a synchronisation."""

    def up(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def made(data: Any, *args: Any, device: Any = None, **how: Any) -> Any:
            goal = None if device is None else torch.device(device)
            if name != "tensor" and isinstance(data, Tensor):
                dtype = how.get("dtype", args[0] if args else None) or data.dtype
                out = data if goal is None else data.to(goal, dtype)
                return out.to(dtype)
            if goal is None or goal.type != "cuda":
                return (
                    real(data, *args, **how)
                    if goal is None
                    else real(data, *args, device=device, **how)
                )
            grad = how.pop("requires_grad", False)
            host = real(data, *args, device="cpu", **how).detach()
            out = move(cuda, host, goal, host.dtype, True, f"torch.{name}(device=cuda)")
            return out.requires_grad_() if grad else out

        return made

    names = ("tensor", "as_tensor", "asarray")
    return {name: up(name, getattr(torch, name)) for name in names}
