"""Operators that every transform of torch understands, and the checks of their arguments.

An operator is a Python function: its annotations give the schema. It is defined with the low-level
``torch.library.Library``: opaque to tracing, with a fake (shapes only) and a rule for ``vmap``. It
has no autograd rule of its own. One that is differentiable is called by an ``autograd.Function``
with ``setup_context``, marked ``in_graph``; one that is not refuses arguments that are being
differentiated. The other ways to define an operator (``custom_op``, ``triton_op``,
``register_autograd``) raise under ``torch.func`` or give gradients of zero without a word, in torch
2.11 to 2.13.
"""

from __future__ import annotations

import functools
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zfunc.errors import ZfuncError

__all__ = [
    "KernelError",
    "Written",
    "agree",
    "aligned",
    "alike",
    "apart",
    "contiguous",
    "copies",
    "define",
    "dense",
    "folded",
    "fresh",
    "fronted",
    "looped",
    "numbers",
    "operator",
    "together",
    "undifferentiated",
    "wide",
]

NAMESPACE = "zfunc"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
RUNS: dict[str, Callable[..., Any]] = {}  # what each operator does, by its name

Batched = tuple[Any, Any]
BatchRule = Callable[..., Batched]  # of the operator, and as `torch.library.register_vmap` says
Written = Annotated[Tensor, "written"]  # an argument that the operator changes; then no ``vmap``

TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[int]: "int[]",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}


class KernelError(ZfuncError, ValueError):
    """Tensors that a kernel cannot take."""


def operator(
    fake: Callable[..., Any] | None = None,
    *,
    batch: BatchRule | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: a function as the operator of its name, less an underscore before it.

    The annotations are the schema. :data:`Written` marks arguments that are changed. A parameter
    that is a ``NamedTuple`` or a dataclass stands for its fields: the operator takes those, one
    after the other, and the function the record made of them.

    Args:
        fake: the same for shapes, dtypes and devices alone; not needed where nothing is returned.
        batch, check: see :func:`define`.

    >>> @operator(torch.empty_like)
    ... def doc_double(x: Tensor) -> Tensor:
    ...     return x + x
    >>> doc_double(torch.ones(2))
    tensor([2., 2.])
    """

    def defined(run: Callable[..., Any]) -> Callable[..., Any]:
        kinds = typing.get_type_hints(run, include_extras=True)
        result = kinds.pop("return")
        several = ", ".join(TYPES[kind] for kind in typing.get_args(result))
        gives = TYPES.get(result, f"({several})")
        takes = ", ".join(_described(label, kind) for label, kind in kinds.items())
        runs, fakes = run, fake or nothing
        if check is not None:
            runs, fakes = _checked(check, runs), _checked(check, fakes)
        records = [None if _is_plain(kind) else kind for kind in kinds.values()]
        if any(records):
            runs, fakes = _gathered(runs, records), _gathered(fakes, records)
        name = run.__name__.lstrip("_")
        return define(f"{name}({takes}) -> {gives}", runs, fakes, batch)

    return defined


def nothing(*args: Any) -> None:
    """What an operator gives that only writes."""


def _is_plain(kind: Any) -> bool:
    return kind in TYPES or kind in (Written, Written | None)


def _described(label: str, kind: Any) -> str:
    """An argument, or the fields of a record, as the schema says them."""
    if kind in TYPES:
        return f"{TYPES[kind]} {label}"
    if _is_plain(kind):
        return f"Tensor({label}!){'' if kind == Written else '?'} {label}"
    fields = typing.get_type_hints(kind, include_extras=True)
    return ", ".join(_described(*field) for field in fields.items())


def _gathered(f: Callable[..., Any], records: list[Any]) -> Callable[..., Any]:
    """``f`` of arguments of which some are given as the fields of a record."""
    sizes = [1 if kind is None else len(typing.get_type_hints(kind)) for kind in records]
    ends = list(itertools.accumulate(sizes))
    places = [(kind, end - size, end) for kind, size, end in zip(records, sizes, ends, strict=True)]

    @functools.wraps(f)
    def gathered(*args: Any) -> Any:
        return f(*[args[a] if kind is None else kind(*args[a:b]) for kind, a, b in places])

    return gathered


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    batch: BatchRule | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """An operator ``zfunc::name`` of a schema in the words of torch.

    Args:
        schema: such as ``"double(Tensor x) -> Tensor"``. Arguments that it changes are
            marked ``Tensor(a!)``; then there is no ``vmap``.
        run: what it does, on any device.
        fake: the same for shapes, dtypes and devices alone.
        batch: its rule for ``vmap``: given the operator, and what
            :func:`torch.library.register_vmap` says.
        check: refuses, given the same, what ``run`` must not touch: kernels read and write memory
            by address, and whoever calls ``torch.ops.zfunc.name`` comes past every other check.
    """
    name = f"{NAMESPACE}::{schema.partition('(')[0]}"
    if check is not None:
        run, fake = _checked(check, run), _checked(check, fake)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    RUNS[name] = run
    torch.library.register_fake(name, fake, lib=LIBRARY)
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name.rpartition(":")[2]).default
    if batch is not None:

        def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> Batched:
            return batch(op, info, dims, *args)

        torch.library.register_vmap(name, rule, lib=LIBRARY)
    return op


def _checked(check: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def checked(*args: Any) -> Any:
        check(*args)
        return run(*args)

    return checked


def folded(elementwise: int) -> BatchRule:
    """The ``vmap`` rule of an operator that treats each element, or row, alone: one call for all.

    Args:
        elementwise: how many of the first arguments are None, or tensors of one shape (or with a
            number for each row of it). The others are shared by all elements; if one of them is
            batched, the calls are made one by one.

    Its tensor results of that shape are batched; others may not be returned.
    """

    def rule(op: Callable[..., Any], info: Any, dims: tuple[Any, ...], *args: Any) -> Batched:
        if any(dim is not None for dim in dims[elementwise:]):
            return looped(op, info, dims, *args)
        flats = fronted(info.batch_size, dims[:elementwise], args[:elementwise])
        out = op(*contiguous(*flats), *args[elementwise:])
        return out, 0 if isinstance(out, Tensor) else (0,) * len(out)

    return rule


def looped(op: Callable[..., Any], info: Any, dims: tuple[Any, ...], *args: Any) -> Batched:
    """The ``vmap`` rule of an operator that works on the whole of its arguments: one call each."""

    def call(i: int) -> Any:
        pairs = zip(args, dims, strict=True)
        return op(*(_element(x, dim, i) for x, dim in pairs))

    calls = [call(i) for i in range(max(info.batch_size, 1))]  # of none: on zeros, for the shapes
    if isinstance(calls[0], Tensor):
        return torch.stack(calls)[: info.batch_size], 0
    columns = tuple(torch.stack(x)[: info.batch_size] for x in zip(*calls, strict=True))
    return columns, (0,) * len(columns)


def _element(x: Any, dim: Any, i: int) -> Any:
    """Element ``i`` of a batched argument, which may be a list of tensors."""
    if isinstance(dim, list | tuple):
        return [_element(part, d, i) for part, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i) if x.shape[dim] else x.sum(dim, dtype=x.dtype)


def fronted(
    size: int, dims: Sequence[Any], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Every tensor with the batch first, expanded where it is not batched."""

    def front(x: Tensor | None, dim: Any) -> Tensor | None:
        if x is None:
            return None
        return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    return [front(x, dim) for x, dim in zip(tensors, dims, strict=True)]


def undifferentiated(name: str, instead: str, *tensors: Tensor | None) -> None:
    """Refuse tensors whose gradient or tangent is asked for: silence would mean zero.

    Args:
        name: the function that was called.
        instead: what to write in its place.
        tensors: its arguments.

    Raises:
        KernelError: one of them requires a gradient, and gradients are on; or has a tangent
            (``torch.func.jvp``).

    >>> undifferentiated("f", "g(x)", torch.ones(1, requires_grad=True))
    Traceback (most recent call last):
    ...
    zfunc.kernels.operators.KernelError: kernels.f has no gradient, but argument 0 requires one: ...
    """
    for i, x in enumerate(tensors):
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise KernelError(
                f"kernels.{name} has no gradient, but argument {i} requires one: detach it "
                f"(or run under torch.no_grad()), or write {instead}."
            )
        if x is not None and forward_ad._current_level >= 0 and _has_tangent(x):
            raise KernelError(
                f"kernels.{name} has no derivative, jvp included, but argument {i} has a tangent: "
                f"detach it, or write {instead}."
            )


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def numbers(*tensors: Tensor) -> bool:
    """Whether tensors are floating-point numbers that arithmetic is defined for: not of 8 bits."""
    wide = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return all(x.dtype in wide for x in tensors)


def wide(x: Tensor) -> torch.dtype:
    """The dtype that sums are made in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fresh(x: Tensor, *rest: Any) -> Tensor:
    """Memory for a result like ``x``, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """All of them contiguous; ``None`` stays what it is."""
    return [None if x is None else x.contiguous() for x in tensors]


def _present(tensors: dict[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(label, x) for label, x in tensors.items() if x is not None]


def copies(name: str, low: Tensor | None) -> None:
    """Check that a buffer for a copy of the parameters can hold one.

    Raises:
        KernelError: it is not of a floating-point dtype.
    """
    if low is not None and not low.is_floating_point():
        raise KernelError(
            f"kernels.{name}: low is {low.dtype}; expected a floating-point dtype: it receives a "
            "copy of the parameters."
        )


def together(name: str, **tensors: Tensor | None) -> None:
    """Check that tensors are on one device.

    Raises:
        KernelError: two of them are not.
    """
    (first, model), *others = _present(tensors)
    for label, x in others:
        if x.device != model.device:
            raise KernelError(
                f"kernels.{name}: {label} is on {x.device}, but {first} is on {model.device}; "
                "expected one device."
            )


def agree(name: str, **tensors: Tensor | None) -> None:
    """Check that buffers have one shape and device.

    Args:
        name: the function that was called.
        tensors: by the name that the caller knows them by; ``None`` is passed over.

    Raises:
        KernelError: two of them differ.
    """
    (first, model), *others = _present(tensors)
    for label, x in others:
        if x.shape != model.shape or x.device != model.device:
            raise KernelError(
                f"kernels.{name}: {label} is {tuple(x.shape)} on {x.device}, but {first} is "
                f"{tuple(model.shape)} on {model.device}; expected one shape and one device."
            )


def alike(name: str, **tensors: Tensor | None) -> None:
    """:func:`agree`, and in dtype.

    Raises:
        KernelError: two of them differ.
    """
    agree(name, **tensors)
    dtypes = {label: x.dtype for label, x in _present(tensors)}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{label} is {dtype}" for label, dtype in dtypes.items())
        raise KernelError(f"kernels.{name}: {found}; expected one dtype.")


def dense(name: str, **tensors: Tensor | None) -> None:
    """Check that buffers which are updated where they lie are contiguous.

    Raises:
        KernelError: one of them is not.
    """
    for label, x in _present(tensors):
        if not x.is_contiguous():
            raise KernelError(
                f"kernels.{name}: {label} of shape {tuple(x.shape)} has strides {x.stride()}; it "
                "is updated where it lies, so it must be contiguous: pass x.contiguous()."
            )


def aligned(x: Tensor, to: int = 16) -> Tensor:
    """``x`` without gaps, beginning at a multiple of ``to`` elements of its memory; copied if not.

    Bytes from there on can be read as numbers of any dtype.
    """
    packed = x.contiguous().view(-1)
    return (packed.clone() if packed.storage_offset() % to else packed).view(x.shape)


def apart(name: str, **tensors: Tensor | None) -> None:
    """Check that buffers which are written to share no memory. For real tensors only.

    Raises:
        KernelError: two of them overlap.
    """
    real = [(x.data_ptr() + x.nbytes, x.data_ptr(), k) for k, x in _present(tensors) if x.numel()]
    order = sorted(real, key=lambda place: place[0])
    for (end, _, before), (_, start, label) in itertools.pairwise(order):
        if start < end:
            raise KernelError(
                f"kernels.{name}: {label} shares memory with {before}; each is updated where it "
                "lies, so give each memory of its own: pass a clone."
            )
