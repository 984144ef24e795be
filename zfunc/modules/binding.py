"""Running a module on given tensors: copies of it on ``meta``, filled for one call.

A :class:`Template` is a copy of the module without data. For a call its parameters
and buffers are written straight into the submodules' dicts, and afterwards taken
out again, so that nothing keeps a gathered weight alive and a leak fails loudly on
``meta`` instead of giving stale numbers.

One template serves one call at a time: :class:`TemplatePool` lends out another where calls
overlap (ranks that are threads, a model called inside its own loss, a backward pass
that recomputes a layer when the model's call is over).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import MappingProxyType
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import Parameter
from torch.nn.utils import parametrize
from torch.overrides import _pop_mode_temporarily

from zfunc.engine.context import current
from zfunc.engine.passes import layer
from zfunc.engine.primitives import Ref
from zfunc.engine.versions import FirstCall
from zfunc.modules.dropout_check import DropoutCheck
from zfunc.modules.lazy import LazySource, lazy_tensor
from zfunc.modules.split_modules import check_plan, local_anatomy, local_skeleton
from zfunc.modules.split_params import check_parts
from zfunc.modules.split_plans import SplitPlan
from zfunc.modules.split_products import Wiring, wire
from zfunc.modules.split_streams import cut_layers, cut_within
from zfunc.modules.swapping import BufferSlot, Slot, compile_tree, write
from zfunc.modules.units import Anatomy, TensorInfo, node_at
from zfunc.ranks.comm import Group
from zfunc.trees.nodes import NAMESPACE, Tree

__all__ = ["LayerCall", "Template", "TemplatePool", "skeleton"]

Filled = tuple[dict[str, Any], str, Any]


def skeleton(module: nn.Module) -> nn.Module:
    """A deep copy with every parameter and buffer on ``meta``; the data are never copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for p in part._parameters.values():
            if p is not None:
                memo[id(p)] = nn.Parameter(_on_meta(p), requires_grad=p.requires_grad)
        for b in part._buffers.values():
            if b is not None:
                memo[id(b)] = _on_meta(b)
        for x in part.__dict__.values():
            # A result kept between calls (weight_norm's) cannot be copied, and need not be.
            if isinstance(x, Tensor) and x.grad_fn is not None:
                memo[id(x)] = _on_meta(x)
    bare = copy.deepcopy(module, memo)
    for part in bare.modules():
        if parametrize.is_parametrized(part):
            _give_own_class(part)
    return bare


def _give_own_class(part: nn.Module) -> None:
    """The class that torch makes for a parametrized module holds that very module, data and all,
    and copies share it."""
    part.__class__ = type(part).__mro__[1]
    parametrize._inject_new_class(part)
    for name in part.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(part, name)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


class LayerCall:
    """``fn(params, *args)`` of one layer: binds plain params into the layer and runs it.

    It stays valid when the model's call is over, because backward may recompute the
    layer then; so it carries what the layer takes from outside itself.
    ``zfunc_name`` is its name in the module.
    """

    __slots__ = (
        "buffers",
        "cut",
        "mode",
        "ranks",
        "serial",
        "shared",
        "template",
        "unit",
        "zfunc_name",
    )

    def __init__(self, template: Template, unit: int) -> None:
        self.template, self.unit = template, unit
        self.zfunc_name = template.anatomy.units[unit].name
        self.serial, self.mode = template.serial, template.mode
        self.ranks, self.cut = template.wiring.ranks, template.wiring.layer
        if template.reaching[unit]:
            self.shared, self.buffers = template.around(unit)

    def __call__(self, params: Tree, *args: Any, **kwargs: Any) -> Any:
        template, unit = self.template, self.unit
        if template.serial != self.serial or template.thread != get_ident():
            with template.pool.lend() as other:
                other.bind_around(self)
                with other.wiring.along(self.cut):
                    return other.run(unit, params, args, kwargs)
        with template.wiring.along(self.cut):
            if template.bound[unit] is params:
                return template.forwards[unit](*args, **kwargs)
            return template.run(unit, params, args, kwargs)

    def __repr__(self) -> str:
        return f"LayerCall({self.zfunc_name})"


class Template:
    """A copy of the module without data, bound to tensors for the time of one call."""

    def __init__(self, pool: TemplatePool) -> None:
        self.pool, self.anatomy, self.name = pool, pool.anatomy, pool.name
        with _unwatched():
            self.module, self.wiring = copy.deepcopy(pool.skeleton), Wiring()
        if pool.plan is not None:  # first, so that kernels leave alone what ends in a sum
            wire(self.wiring, self.module, self.anatomy, pool.plan, pool.rank)
        for fuse in pool.fuses:
            fuse(self.module)
        if pool.plan is not None:
            cut_within(self.wiring, self.module, self.anatomy, pool.plan)
        self.modules = dict(self.module.named_modules())
        self.flags = [(part, part.training) for part in self.modules.values()]
        self.mode: bool | None = None
        self.serial, self.thread = 0, 0
        self.lease: Callable[[], TemplateLease | None] | None = None
        self.facade: Any = None
        self.sources: dict[str, Tensor] = {}
        units = self.anatomy.units
        self.values: list[Any] = [None] * len(units)
        self.bound: list[Any] = [None] * len(units)
        self.resting: list[Any] = [None] * len(units)  # which of `unit_rest` is in the slots
        self.lazy_source = LazySource()
        self.reaching = [bool(unit.shared or unit.buffers) for unit in units]
        self._find_slots()
        self.split = [
            self._parts(leaves) for leaves in (self.anatomy.root, *(u.leaves for u in units))
        ]
        self._compile()
        self.layers = [self.modules[unit.module] for unit in units]
        self.forwards = [self._route(i, part) for i, part in enumerate(self.layers)]
        if pool.plan is not None:
            cut_layers(self.wiring, self.module, self.anatomy, pool.plan)

    # --- construction ---

    def _slots(self, leaf: TensorInfo, kind: str = "_parameters") -> tuple[Slot, ...]:
        return tuple((getattr(self.modules[m], kind), attribute) for m, attribute in leaf.homes)

    def _parts(self, leaves: Iterable[TensorInfo]) -> list[tuple[dict[str, Any], str, str]]:
        """Where those of some leaves are that are split."""
        splits = {} if self.pool.plan is None else self.pool.plan.splits
        split = [leaf for leaf in leaves if leaf.name in splits]
        return [(*self._slots(leaf)[0], leaf.name) for leaf in split]

    def _resting(
        self,
        leaves: Iterable[TensorInfo],
        source: LazySource,
        unit: int = -1,
        device: torch.device | None = None,
        dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
    ) -> list[Filled]:
        """What is in the slots between calls: tensors that say so when they are looked at."""
        lazies = [
            (leaf, lazy_tensor(source, unit, leaf, dtypes.get(leaf.dtype, leaf.dtype), device))
            for leaf in leaves
        ]
        return [(*slot, lazy) for leaf, lazy in lazies for slot in self._slots(leaf)]

    def _find_slots(self) -> None:
        closed = LazySource()
        self.rest = self._resting(self.anatomy.root, closed)
        self.roots = [(leaf.dtype, *self._slots(leaf)[0]) for leaf in self.anatomy.root]
        self.unit_rest = [self._resting(unit.leaves, closed) for unit in self.anatomy.units]
        self.buffers = {
            leaf.name: BufferSlot(self._slots(leaf, "_buffers")) for leaf in self.anatomy.buffers
        }
        parts = list(self.modules.values())
        self.holders = [(part._buffers, dict(part._buffers)) for part in parts]
        self.filled = [holder for holder, _ in self.holders]
        self.usual = sum(map(len, self.filled))
        self.rnns = [
            (part, part._flat_weights, part._flat_weight_refs)
            for part in parts
            if isinstance(part, nn.RNNBase)
        ]
        for rnn, *_ in self.rnns:  # it would move the weights it is given into a buffer of its own
            rnn.__dict__["flatten_parameters"] = lambda: None

    def _compile(self) -> None:
        infos = self.anatomy.infos
        units = {(*unit.stack, unit.index): i for i, unit in enumerate(self.anatomy.units)}
        self.unit_nodes = [compile_tree(node_at(infos, path), self._slots) for path in units]
        self.node = compile_tree(infos, self._slots, units)
        if self.anatomy.is_stack:
            ((_, self.node),) = self.node[3]

    def _route(self, i: int, part: nn.Module) -> Callable[..., Any]:
        """Send calls of a unit through ``layer``; returns what it did before."""
        forward = part.forward

        @functools.wraps(forward)
        def routed(*args: Any, **kwargs: Any) -> Any:
            params = self.values[i]
            # What layer() comes to where nothing surrounds layers, without its price.
            if isinstance(params, dict) and ((running := current()) is None or not running.around):
                if running is None:
                    return forward(*args, **kwargs)
                index, scope_of = running.next_layer()
                if scope_of is None:
                    return forward(*args, **kwargs)
                with scope_of(index):
                    return forward(*args, **kwargs)
            return layer(LayerCall(self, i), params, *args, **kwargs)

        part.__dict__["forward"] = routed
        return forward

    # --- one call ---

    def bind(
        self,
        params: Tree,
        buffers: dict[str, Tensor],
        mode: bool | None,
        ranks: Group | None = None,
    ) -> None:
        """Fill the whole template. :meth:`give_back` afterwards, whatever happens.

        Args:
            ranks: those among which the leaves are split, in the pool of a plan.
        """
        self._open(mode, ranks)
        write(params, self.node, self.values, self.anatomy.leaves, self.name)
        for value in self.values:
            if isinstance(value, Ref):
                self._face()
                break
        self.lazy_source.hold(self.values)
        for i, value in enumerate(self.values):
            if self.resting[i] is self.unit_rest[i] and isinstance(value, Ref):
                self.bound[i] = value
            else:
                self.bind_unit(i, value)
        if self.pool.plan is not None:
            for rows, value in zip(self.split, (None, *self.values), strict=True):
                check_parts(() if isinstance(value, Ref) else rows, self.pool.plan.ways)
        self.sources = buffers
        for key, buffer in self.buffers.items():
            buffer.bind(buffers[key])

    def bind_around(self, call: LayerCall) -> None:
        """Fill what one layer takes from outside itself."""
        self._open(call.mode, call.ranks)
        unit = self.anatomy.units[call.unit]
        if not self.reaching[call.unit]:
            return
        for leaf, x in zip(unit.shared, call.shared, strict=True):
            for holder, attribute in self._slots(leaf):
                holder[attribute] = x
        for name in unit.buffers:
            self.buffers[name].bind(call.buffers[name])

    def run(self, i: int, params: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's own forward on plain params; what was bound before comes back after."""
        before = self.bound[i]
        try:
            self.bind_unit(i, params)
            return self.forwards[i](*args, **kwargs)
        finally:
            self.bind_unit(i, before)

    def renew(self) -> None:
        """Buffers for another call on the same parameters, as if there had been none before."""
        self._release_buffers()
        for name, buffer in self.buffers.items():
            buffer.bind(self.sources[name])

    def new_buffers(self) -> dict[str, Tensor]:
        """The buffers as the call left them."""
        return {name: buffer.result() for name, buffer in self.buffers.items()}

    def around(self, i: int) -> tuple[list[Any], dict[str, Tensor]]:
        """What layer ``i`` takes from outside itself: the root's tensors, and its buffers."""
        unit = self.anatomy.units[i]
        homes = [leaf.homes[0] for leaf in unit.shared]
        shared = [self.modules[m]._parameters[attribute] for m, attribute in homes]
        return shared, {name: self.sources[name] for name in unit.buffers}

    def running_units(self) -> list[int]:
        """The layers that have parameters for the time of a call of their own, which is on."""
        rows = enumerate(zip(self.bound, self.values, strict=True))
        return [i for i, (bound, value) in rows if bound is not value]

    def reach(self, over: bool) -> None:
        """Let layers' parameters be read from outside their calls; ``over``: no more."""
        self.lazy_source.hold(() if over else self.values)

    def keep(self) -> ReplayedRegion:
        """What is here now, for a region of the module that backward runs again."""
        lease = None if self.lease is None else self.lease()
        if lease is None:
            lease = TemplateLease(self)
            self.lease = weakref.ref(lease)
        return ReplayedRegion(lease)

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *error: object) -> None:
        """The call is over; what may run again in backward keeps the parameters here."""
        lease = None if self.lease is None else self.lease()
        if lease is None:
            self.give_back()
            return
        self.serial += 1
        self._release_buffers()
        self.reach(over=True)
        lease.over = True

    def give_back(self) -> None:
        """Nobody needs what is here any more: every tensor is taken out again."""
        self.lease = None
        self.serial += 1
        _fill(self.rest)
        self.lazy_source.hold(())
        for i, rest in enumerate(self.unit_rest):
            if self.resting[i] is not rest:
                self.bind_unit(i, None)
        self.bound[:] = self.values[:] = [None] * len(self.values)
        self._release_buffers()
        self.wiring.ranks, self.wiring.streaming = None, False
        for rnn, weights, refs in self.rnns:
            rnn._flat_weights, rnn._flat_weight_refs = weights, refs
        self.sources = {}
        self.pool.idle.append(self)

    def _release_buffers(self) -> None:
        for buffer in self.buffers.values():
            buffer.release()
        # One that has been replaced by another would be one more, and one taken out: each call
        # binds all that there were.
        if sum(map(len, self.filled)) == self.usual:
            return
        for holder, names in self.holders:
            if len(holder) != len(names):
                kept = {name: holder.get(name, rest) for name, rest in names.items()}
                holder.clear()
                holder.update(kept)

    def _open(self, mode: bool | None, ranks: Group | None) -> None:
        self.serial += 1
        self.thread, self.wiring.ranks = get_ident(), ranks
        plan = self.pool.plan
        # Streams are cut for what is kept of them for backward.
        self.wiring.streaming = bool(plan and plan.streams) and torch.is_grad_enabled()
        if mode is not self.mode:
            self.mode = mode
            for part, training in self.flags:
                part.training = training
            if mode is not None:
                self.module.train(mode)

    def bind_unit(self, i: int, value: Any) -> None:
        """Bind a unit's plain params; a ``Ref`` or nothing leaves its resting tensors."""
        if value is None or isinstance(value, Ref):
            if self.resting[i] is not self.unit_rest[i]:
                self.resting[i] = self.unit_rest[i]
                _fill(self.unit_rest[i])
        else:
            unit, self.resting[i] = self.anatomy.units[i], None
            write(value, self.unit_nodes[i], [], unit.leaves, f"layer {unit.name}")
        self.bound[i] = value

    def _face(self) -> None:
        """Let layers' parameters rest as lazy tensors of the kind that the root's are now."""
        device, dtypes = None, {}
        for dtype, holder, attribute in self.roots:
            device, dtypes[dtype] = holder[attribute].device, holder[attribute].dtype
        if (device, dtypes) == self.facade:
            return
        self.facade = (device, dtypes)
        for i, unit in enumerate(self.anatomy.units):
            self.unit_rest[i] = self._resting(unit.leaves, self.lazy_source, i, device, dtypes)


@contextmanager
def _unwatched() -> Iterator[None]:
    """A block whose calls no mode of the caller's sees: it would take as long as all the rest."""
    with ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _fill(slots: Iterable[Filled]) -> None:
    for holder, attribute, x in slots:
        holder[attribute] = x


class TemplatePool:
    """The idle templates of one module. Pickles as its skeleton and what is fused in it.

    ``fuses``: functions that let kernels take over what they can in a template, in this order; the
    skeleton stays as it is. ``plan`` and ``rank``: by which plan, and as which rank's, the leaves
    are parts of those of the module.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        anatomy: Anatomy,
        fuses: tuple[Callable[..., None], ...] = (),
        plan: SplitPlan | None = None,
        rank: int = 0,
    ) -> None:
        self.skeleton, self.anatomy, self.fuses = skeleton, anatomy, fuses
        self.plan, self.rank = plan, rank
        self.idle: list[Template] = []
        self.variants: dict[Any, TemplatePool] = {}
        self.dropout, self.first = DropoutCheck(skeleton), FirstCall()

    @property
    def name(self) -> str:
        """What the module is called in errors."""
        kind = type(self.skeleton).__name__
        return kind if self.plan is None else f"{kind}, of which rank {self.rank} has a part"

    def fused(self, fuse: Callable[..., None]) -> TemplatePool:
        """The pool of the same module with ``fuse`` before all else: always the same one."""
        if fuse not in self.variants:
            fuses = (fuse, *self.fuses)
            made = TemplatePool(self.skeleton, self.anatomy, fuses, self.plan, self.rank)
            self.variants[fuse], made.dropout = made, self.dropout
        return self.variants[fuse]

    def split(self, plan: SplitPlan, rank: int) -> TemplatePool:
        """The pool of the module on a rank's parts of its leaves: always the same one for a plan.

        Raises:
            CompositionError: the plan is not one of this module.
        """
        for known in tuple(self.variants.values()):
            if known.rank == rank and (known.plan is plan or known.plan == plan):
                return known
        check_plan(self.skeleton, self.anatomy, plan)
        skeleton = local_skeleton(self.skeleton, self.anatomy, plan, rank)
        anatomy = local_anatomy(self.anatomy, plan, rank)
        made = TemplatePool(skeleton, anatomy, self.fuses, plan, rank)
        self.variants[id(plan), rank], made.dropout = made, self.dropout
        return made

    def lend(self) -> Template:
        """A template for one ``with`` block; others may borrow theirs meanwhile, in any thread."""
        try:
            return self.idle.pop()
        except IndexError:
            return Template(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"skeleton": self.skeleton, "anatomy": self.anatomy, "fuses": self.fuses}
        kept |= {"plan": self.plan, "rank": self.rank}
        asked = {"dropout": DropoutCheck(self.skeleton), "first": FirstCall()}
        return {**kept, **asked, "idle": [], "variants": {}}


# A region of a module that is recomputed in backward finds the template as it was. Its code holds
# on to the template's submodules, so no other copy of the module will do. As long as somebody may
# run it again the template stays lent, with the parameters of its call in it.


class TemplateLease:
    """Held by what may run again; with the last of them the template goes back to its pool."""

    __slots__ = ("__weakref__", "over", "template")

    def __init__(self, template: Template) -> None:
        self.template = template
        self.over = False  # whether the call itself is

    def __del__(self) -> None:
        if self.over:
            self.template.give_back()


class ReplayedRegion:
    """What a template holds where a region of its module begins.

    Layers that run at this moment hold parameters for as long as they run: these are ``leaves``.
    Whatever else is in the template stays there.
    """

    def __init__(self, lease: TemplateLease) -> None:
        self.lease = lease
        template = lease.template
        self.serial, self.cut = template.serial, template.wiring.layer
        self.inside = template.running_units()
        found: Tree = [template.bound[i] for i in self.inside]
        flat: list[Any]
        flat, self.spec = optree.tree_flatten(found, none_is_leaf=True, namespace=NAMESPACE)
        self.tensors = [i for i, x in enumerate(flat) if type(x) in (Tensor, Parameter)]
        self.leaves: Sequence[Tensor] = [flat[i] for i in self.tensors]
        self.rest = [None if type(x) in (Tensor, Parameter) else x for x in flat]
        self.buffers = BufferValues(template)

    @contextmanager
    def again(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """A block in which the template holds what it held, with these in place of ``leaves``."""
        template = self.lease.template
        flat = list(self.rest)
        for i, x in zip(self.tensors, leaves, strict=True):
            flat[i] = x
        values = optree.tree_unflatten(self.spec, flat)
        before = [template.bound[i] for i in self.inside]
        call = template.serial, template.thread
        now = [dict(holder) for holder, _ in template.holders]
        template.serial, template.thread = self.serial, get_ident()
        try:
            template.reach(over=False)
            self.buffers.put()
            for i, value in zip(self.inside, values, strict=True):
                template.bind_unit(i, value)
            with template.wiring.along(self.cut):
                yield
        finally:
            for i, value in zip(self.inside, before, strict=True):
                template.bind_unit(i, value)
            template.reach(over=self.lease.over)
            for (holder, _), names in zip(template.holders, now, strict=True):
                _refill(holder, names)
            template.serial, template.thread = call


class BufferValues:
    """The values of a template's buffers at one moment."""

    def __init__(self, template: Template) -> None:
        self.holders = [holder for holder, _ in template.holders]
        large = {
            id(slot.work): (slot, template.sources[name])
            for name, slot in template.buffers.items()
            if not slot.small and slot.untouched()
        }
        copies: dict[int, Any] = {}  # one for each, wherever it is registered
        self.values: list[dict[str, Any]] = []
        for holder in self.holders:
            for x in holder.values():
                if x is not None and id(x) not in copies:
                    copies[id(x)] = large.get(id(x)) or _copied(x)
            self.values.append({k: x if x is None else copies[id(x)] for k, x in holder.items()})

    def put(self) -> None:
        """Write copies of them into the template."""
        copies: dict[int, Any] = {}
        for holder, values in zip(self.holders, self.values, strict=True):
            for value in values.values():
                if value is not None and id(value) not in copies:
                    copies[id(value)] = _fresh(value)
            _refill(holder, {k: v if v is None else copies[id(v)] for k, v in values.items()})


def _fresh(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _copied(value)
    slot, source = value  # a large one: its copy serves if nobody has written to it since
    return slot.work if slot.untouched() and slot.source is source else _copied(source)


def _copied(x: Tensor) -> Tensor:
    """A copy, which nobody else writes to; of what belongs to a graph the tensor itself."""
    return x if x.requires_grad else x.detach().clone()


def _refill(holder: dict[str, Any], values: dict[str, Any]) -> None:
    if holder.keys() != values.keys():
        holder.clear()
    holder.update(values)
