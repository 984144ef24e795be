"""A tensor that is elsewhere: it has a shape, a dtype and a device, and no memory.

Functions of torch take ghosts and give ghosts. The run that is under way is told which ones they
use. Where the numbers are needed there is an error that says so; where they have come, the ghost
becomes a tensor with them, and whoever had the ghost has that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from zfunc.errors import CompositionError
from zfunc.layout.layout import Layout
from zfunc.rehearsal.plans import Label, Spec
from zfunc.rehearsal.shapes import (
    Arguments,
    Fresh,
    Given,
    Outcome,
    Shape,
    outcome,
    remade,
    shape_of,
)
from zfunc.rehearsal.sites import site

__all__ = [
    "METADATA",
    "RULES",
    "RUN",
    "Ghost",
    "GhostMemory",
    "GhostRun",
    "Recipe",
    "become",
    "computed",
    "form_of",
    "ghost_leaves",
    "ghost_like",
    "has_own_memory",
    "in_function",
    "is_shared",
    "named",
    "refusal",
    "settle",
    "with_makers",
]


class GhostRun(Protocol):
    """What is under way: a rehearsal, or the run of a chunk.

    Attributes:
        chunk: whose layers run now, or ran last.
        within: the call of a layer that runs now, or -1.
    """

    chunk: int
    within: int

    def used(self, func: Any, ghosts: Sequence[Ghost], light: bool, below: bool) -> bool:
        """An operation is about to use ghosts.

        Args:
            func: the operation.
            ghosts: those among its arguments.
            light: whether what it gives can be made again from parameters alone.
            below: whether autograd is above it already.

        Returns:
            Whether they have become tensors: then it is called again.
        """

    def counted(self, flops: int) -> None:
        """An operation takes that much work."""

    def draws(self, func: Any, args: Any, kwargs: dict[str, Any], uneven: bool) -> None:
        """An operation outside layers draws random numbers, where it is computed.

        Args:
            func, args, kwargs: the call.
            uneven: whether numbers decide how many.
        """

    def writes(self, func: Any, x: Ghost) -> None:
        """An operation writes to a ghost."""

    def overwrote(self, x: Tensor, was: Tensor) -> None:
        """A tensor became a ghost, since an operation on ghosts writes to it."""

    def hooked(self, x: Ghost) -> None:
        """A ghost was given a hook outside of layers."""

    def refused(self, message: str) -> BaseException:
        """The error for an operation that cannot be done without numbers."""


RUN: ContextVar[GhostRun | None] = ContextVar("zfunc_rehearsal_run", default=None)


class GhostMemory:
    """Stands for what views share.

    Attributes:
        version: how often it has been written to.
        chunk: whose was the last time.
        needs: whether something was written that may have a gradient.
        is_here: whether a tensor that is no ghost has it, too.
    """

    version, chunk, needs, is_here = 0, -1, False, False

    def written(self, chunk: int, needs: bool) -> None:
        """A chunk has written to it."""
        self.version, self.chunk = self.version + 1, max(self.chunk, chunk)
        self.needs = self.needs or needs


class Recipe:
    """How a value is made of parameters alone: a call, and which tensor of its result it is.

    The call comes later than in the loss, so the lists and dicts among its arguments are copies.

    Args:
        func, args, kwargs: a call that is made now.
        tensors: those among its arguments.
        place: of the tensor among those in its result.
    """

    __slots__ = ("args", "func", "kwargs", "place", "reads", "recorded")

    def __init__(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], place: int = 0
    ) -> None:
        self.func, self.args, self.kwargs, self.place = func, _own(args), _own(kwargs), place
        self.recorded = torch.is_grad_enabled()
        self.reads = list(zip(tensors, map(_written, tensors), strict=True))

    def made(self) -> Tensor:
        """The value, from what the arguments were.

        Raises:
            CompositionError: one of them has been written to since.
        """
        for x, written in self.reads:
            if _written(x) != written:
                raise refusal(
                    self.func,
                    f"it is made of parameters where it is used, from a tensor of shape "
                    f"{list(x.shape)} that has been written to in the meantime. Give it a copy, "
                    "x.clone(), or write to one",
                )
        with torch.set_grad_enabled(self.recorded):
            out = self.func(*self.args, **self.kwargs)
        return out if isinstance(out, Tensor) else _tensors(out)[self.place]


CAME = "_came_written"
"""The name under which a tensor that was a ghost has how often it had been written to then."""


def _written(x: Tensor) -> int:
    """How often a tensor was written to, also while it was a ghost; -1 if nobody can know."""
    if type(x) is Ghost:
        return 0 if x.light else -1
    return 0 if x.is_inference() else x._version - int(x.__dict__.get(CAME, 0))


def _own(tree: Any) -> Any:
    """The same in lists and dicts of its own."""
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind(map(_own, tree))
    return dict(zip(tree, map(_own, tree.values()), strict=True)) if kind is dict else tree


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for part in tree for x in _tensors(part)] if isinstance(tree, tuple | list) else []


class Ghost(Tensor):
    """A tensor that is elsewhere.

    Attributes:
        form: its shape, strides and dtype.
        place: its device.
        maker: the chunk that computes it.
        tracked: whether it had a gradient, if it may, when it was made.
        leaves: of which parameters it was made, if of these alone; ``None`` of anything else.
        recipe: how; ``None`` of a parameter itself.
        label: where layers met it first, and how often its memory had been written then.
        memory: shared with its views.
        version: how often that had been written to when it was made.
        within: the call of a layer in which it was made, and which alone has it; else -1.
        made: its label by what has made it between layers, and how often it had been written to.
        of: the ghosts that it was made of between layers.
    """

    form: Shape
    place: torch.device
    maker: int
    tracked: bool
    leaves: frozenset[int] | None
    recipe: Recipe | None
    label: tuple[Label, int] | None
    memory: GhostMemory
    version: int
    within: int
    made: tuple[Label, int] | None
    of: Sequence[Ghost]

    # What models ask for most, without the way through `__torch_function__`, or a function of ours.

    shape = property(attrgetter("form.shape"))
    dtype = property(attrgetter("form.dtype"))
    device = property(attrgetter("place"))

    def as_subclass(self, cls: Any) -> Any:
        """Torch asks no ``__torch_function__`` here."""
        return Ghost.__torch_function__(Tensor.as_subclass, (Ghost,), (self, cls))

    @property
    def light(self) -> bool:
        """Whether it is made of parameters alone, or of nothing: anyone can make it again."""
        return self.leaves is not None and self.version == self.memory.version

    @property
    def needs(self) -> bool:
        """Whether it may have a gradient."""
        dtype = self.form.dtype
        return (self.tracked or self.memory.needs) and (dtype.is_floating_point or dtype.is_complex)

    @property
    def home(self) -> int:
        """The chunk that has its value: that of whoever made it, or wrote to it last."""
        return max(self.maker, self.memory.chunk)

    @property
    def known_as(self) -> Label | None:
        """Its label, if it has not been written to since."""
        if self.label is None or self.label[1] != self.memory.version:
            return None
        return self.label[0]

    @property
    def made_as(self) -> Label | None:
        """Its label by what has made it, if it has not been written to since."""
        return self.made[0] if self.made and self.made[1] == self.memory.version else None

    @property
    def spec(self) -> Spec:
        """All that others have to know of it."""
        form = self.form
        return Spec(form.shape, form.dtype, self.device, self.needs, form.stride)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        rule = RULES.get(func)
        if rule is not None:
            return rule(func, args, kwargs or {})
        return computed(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func.overloadpacket)
        if rule is not None:
            return rule(func, args, kwargs or {})
        return computed(func, args, kwargs or {}, below=True)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Ghost({list(self.form.shape)}, {self.form.dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def ghost_like(
    form: Shape,
    device: torch.device,
    maker: int,
    needs: bool = False,
    leaves: frozenset[int] | None = None,
    recipe: Recipe | None = None,
    memory: GhostMemory | None = None,
) -> Ghost:
    """A new ghost."""
    new = Tensor._make_wrapper_subclass(
        Ghost, form.shape, strides=form.stride, dtype=form.dtype, device=device
    )
    own = new.__dict__
    own["form"], own["place"], own["maker"], own["label"] = form, device, maker, None
    own["made"], own["of"] = None, ()
    own["tracked"] = needs
    own["leaves"], own["recipe"], own["memory"] = leaves, recipe, memory or GhostMemory()
    own["version"], own["within"] = own["memory"].version, -1
    made: Ghost = new
    return made


def ghost_leaves(
    layout: Layout, device: torch.device, compute: torch.dtype | None, indices: Iterable[int]
) -> dict[int, Any]:
    """A ghost for each of some leaves of a layout.

    Args:
        layout: which leaves.
        device: where they would be.
        compute: the dtype in which floating-point ones enter; by default their own.
        indices: of those that are wanted.
    """
    found: dict[int, Any] = {}
    for i in indices:
        if (slot := layout.slots[i]) is not None:
            flat = layout.flats[slot.flat]
            short = compute is not None and flat.dtype.is_floating_point
            dtype = compute if short else flat.dtype if slot.code is None else slot.code.dtype
            form = _contiguous(slot.own, dtype)
            ghost = ghost_like(form, device, -1, flat.trainable, frozenset((i,)))
            found[i] = layout.marked(slot, ghost)
    return found


@cache
def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Shape:
    return shape_of(torch.empty(shape, dtype=dtype, device="meta"))


def settle(x: Any) -> Any:
    """``x``; a ghost that is made of nothing (zeros like another one) becomes a tensor."""
    if _is_of_nothing(x):
        for ghost in with_makers(x, _is_of_nothing):
            become(ghost, ghost.recipe.made())
    return x


def _is_of_nothing(x: Any) -> bool:
    return type(x) is Ghost and x.recipe is not None and x.light and not x.leaves


def with_makers(x: Any, can: Callable[[Any], bool]) -> Iterator[Any]:
    """A ghost that can be made, behind all that its recipe needs: each is made when it comes.

    A loop: operations may follow each other in longer rows than Python lets calls be deep."""
    todo = [x]
    while todo:
        if not can(todo[-1]):
            todo.pop()
        elif needed := [y for y, _ in todo[-1].recipe.reads if can(y)]:
            todo += needed
        else:
            yield todo[-1]


def become(x: Tensor, new: Tensor) -> None:
    """Let ``x`` be what ``new`` is, and the other way round: whoever has ``x`` has that.

    Raises:
        CompositionError: autograd or a view holds on to one of them.
    """
    if holders(x) > 1 or holders(new) > 1:
        raise CompositionError(
            f"a tensor of shape {list(x.shape)} that is computed, or written to, by another stage "
            f"of a pipeline is held by autograd or torch.func, or has views, at {site()}. Give "
            "layers a tensor of its own, x.clone(), and do not write to views of one. A layer that "
            "looks at numbers does so before it calls torch.func."
        )
    if type(x) is Ghost and x.light and not new.is_inference():
        new.__dict__[CAME] = new._version
    x.__class__, new.__class__ = new.__class__, x.__class__
    x.__dict__, new.__dict__ = new.__dict__, x.__dict__
    torch._C._swap_tensor_impl(x, new)


holders: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""How many hold on to a tensor below Python."""

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private, so perhaps absent


def is_shared(x: Tensor) -> bool:
    """Whether another tensor has a part of its memory, too."""
    if x._is_view() or _use_count is None or x.layout is not torch.strided:
        return x._is_view()
    storage = x.untyped_storage()  # a reference of its own, beside the tensor's
    return bool(_use_count(storage._cdata) > 2)


def has_own_memory(x: Tensor) -> bool:
    """Whether its numbers are its own: it is no ghost, and of no class that may hold some."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def form_of(x: Tensor) -> Shape:
    """The shape of a tensor or a ghost."""
    return x.form if type(x) is Ghost else shape_of(x)


def in_function() -> bool:
    """Within ``autograd.Function.forward``, the one place that turns off forward-mode AD alone.

    Gradients are not recorded there, and nevertheless the results have some.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def computed(func: Any, args: Any, kwargs: dict[str, Any], below: bool = False) -> Any:
    """What a function gives for ghosts, and perhaps tensors: ghosts.

    Args:
        func, args, kwargs: the call.
        below: whether autograd is above it already.
    """
    given = Arguments(func, args, kwargs, form_of)
    nested = torch._C._functorch.maybe_current_level() is not None
    if nested and not below and _in_torch_func(given.tensors):
        with DisableTorchFunctionSubclass():  # the dispatcher knows what is differentiated
            return func(*args, **kwargs)
    run = RUN.get()
    outside = run is not None and run.within < 0
    # What draws random numbers would draw others a second time.
    random = not below and _is_random(getattr(func, "__name__", ""))
    light = outside and not (below or random or in_function())
    ghosts: list[Ghost] = []
    for x in given.tensors:
        if type(x) is Ghost:
            ghosts.append(x)
            light = light and x.light
    if run is not None and run.used(func, ghosts, light, below):
        return func(*args, **kwargs)
    if not below and torch.is_autocast_enabled(ghosts[0].place.type):
        with DisableTorchFunctionSubclass():  # the dispatcher knows what autocast means
            return func(*args, **kwargs)
    try:
        found = outcome(func, args, kwargs, given, form_of)
    except (RuntimeError, NotImplementedError) as error:
        if (why := _needs_numbers(error)) is None:
            raise
        raise refusal(func, why) from error
    if run is not None and found.flops:
        run.counted(found.flops)
    if run is not None and light and (found.draws or found.writes):
        run.used(func, ghosts, False, below)  # it is made here, and not once more
        light = False
    if run is not None and outside and (found.draws or random):
        run.draws(func, args, kwargs, found.uneven)
    if found.writes:
        _write(run, func, given.tensors, found)
    return _results(run, func, args, kwargs, given, found, ghosts, light)


def _in_torch_func(tensors: Sequence[Tensor]) -> bool:
    """Whether ``torch.func`` differentiates by one of them, and has put something around it.

    (Of rows, under vmap, torch squeezes a product in place, which no ghost can follow.)"""
    wrapped = False
    for x in tensors:
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            if torch._C._functorch.is_batchedtensor(x):
                return False
            x, wrapped = torch._C._functorch.get_unwrapped(x), True
    return wrapped


@cache
def _is_random(name: str) -> bool:
    return any(part in name for part in _RANDOM)


_RANDOM = (
    "drop",
    "rand",
    "bernoulli",
    "normal_",
    "uniform",
    "exponential",
    "multinomial",
    "rrelu",
    "poisson",
    "gumbel",
    "lstm",
    "gru",
    "rnn",
    "multi_head_attention",
    "scaled_dot_product",
    "geometric_",
    "cauchy",
)


def _needs_numbers(error: Exception) -> str | None:
    """Why a function cannot be done on shapes alone, if that is what this error says."""
    if "meta" not in str(error).lower() and not isinstance(error, NotImplementedError):
        return None
    why = str(error).splitlines()[0]
    if any(part in why for part in ("Meta tensors", "'Meta' backend", "register_meta")):
        why = "torch cannot tell without numbers what shape it gives. Do that inside a layer, "
        why += "or behind the step, or write it in other functions (torch.where, say)"
    return why


def _write(run: GhostRun | None, func: Any, tensors: Sequence[Tensor], found: Outcome) -> None:
    chunk = -1 if run is None else run.chunk
    for i in found.writes:
        x = tensors[i]
        if type(x) is not Ghost:
            if is_shared(x):
                raise refusal(func, "it writes into a part of a tensor that is here")
            was = ghost_like(shape_of(x), x.device, chunk, torch.is_grad_enabled())
            become(x, was)
            if run is not None:
                run.overwrote(x, was)
            continue
        if run is not None:
            run.writes(func, x)
        x.memory.written(max(chunk, x.home), _may_have_gradient(func, tensors))


def _results(
    run: GhostRun | None,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    given: Arguments,
    found: Outcome,
    ghosts: Sequence[Ghost],
    light: bool,
) -> Any:
    tensors, device = given.tensors, given.device or ghosts[0].place
    chunk = -1 if run is None else run.chunk
    needs = _may_have_gradient(func, tensors)
    leaves: frozenset[int] | None = frozenset().union(*map(_leaves, ghosts)) if light else None
    place = -1

    def make(x: Given | Fresh) -> Tensor:
        nonlocal place
        place += 1
        if isinstance(x, Given):
            return tensors[x.index]
        of = tensors[x.memory] if x.memory >= 0 else None
        memory = of.memory if type(of) is Ghost else None
        recipe = Recipe(func, args, kwargs, tensors, place) if light else None
        made = ghost_like(x.shape, device, chunk, needs, leaves, recipe, memory)
        made.within = -1 if run is None else run.within
        return made

    return make(found.result) if type(found.result) is Fresh else remade(found.result, make)


_leaves = attrgetter("leaves")


def _may_have_gradient(func: Any, tensors: Sequence[Tensor]) -> bool:
    """What a Function's forward detaches, or computes without a graph, has one all the same."""
    if in_function() or (torch.is_grad_enabled() and func not in DETACHING):
        for x in tensors:
            if x.needs if type(x) is Ghost else x.requires_grad:
                return True
    return False


def refusal(func: Any, why: str) -> BaseException:
    """The error for an operation that cannot be done without numbers."""
    run = RUN.get()
    message = f"{named(func)} at {site()} met a value that another stage of a pipeline has: {why}"
    return CompositionError(message) if run is None else run.refused(message)


def named(func: Any) -> str:
    """An operation's name."""
    if (schema := getattr(func, "_schema", None)) is not None:
        return str(schema.name)
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return str(name)


# --- what needs no numbers, and special cases -----------------------------------------------------

_PROPERTIES = "shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_sparse_csr is_mps"
_PROPERTIES += " is_quantized is_nested is_xpu is_xla is_mkldnn is_leaf itemsize nbytes"
_METHODS = "size dim numel nelement ndimension element_size get_device is_floating_point is_complex"
_METHODS += " stride is_contiguous storage_offset is_signed is_inference is_conj is_neg __len__"
_METHODS += " __hash__ has_names is_same_size dim_order"
_FUNCTIONS: list[Any] = [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed]
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)]
    + _FUNCTIONS
)
DETACHING = frozenset([Tensor.detach, torch.detach, Tensor.data.__get__])  # type: ignore[attr-defined]
RULES: dict[Any, Callable[[Any, Any, dict[str, Any]], Any]] = {}
"""Functions that need more than shapes, or less: ``zfunc.rehearsal.known`` fills it."""
