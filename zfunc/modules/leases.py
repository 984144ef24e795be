"""A template that a region of a module, to be recomputed in backward, finds as it was.

Its code holds on to the template's submodules, so no other copy of the module will do. As long as
somebody may run it again the template stays lent, with the parameters of its call in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import optree
from torch import Tensor
from torch.nn import Parameter

from zfunc.nodes import NAMESPACE, Tree

if TYPE_CHECKING:
    from zfunc.modules.binding import Template

__all__ = ["Lease", "Region"]


class Lease:
    """Held by what may run again; with the last of them the template goes back to its pool."""

    __slots__ = ("__weakref__", "over", "template")

    def __init__(self, template: Template) -> None:
        self.template = template
        self.over = False  # whether the call itself is

    def __del__(self) -> None:
        if self.over:
            self.template.give_back()


class Region:
    """What a template holds where a region of its module begins.

    Layers that run at this moment hold parameters for as long as they run: these are ``leaves``.
    Whatever else is in the template stays there.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        template = lease.template
        self.serial = template.serial
        self.inside = template.running_units()
        found: Tree = [template.bound[i] for i in self.inside]
        flat: list[Any]
        flat, self.spec = optree.tree_flatten(found, none_is_leaf=True, namespace=NAMESPACE)
        self.tensors = [i for i, x in enumerate(flat) if type(x) in (Tensor, Parameter)]
        self.leaves: Sequence[Tensor] = [flat[i] for i in self.tensors]
        self.rest = [None if type(x) in (Tensor, Parameter) else x for x in flat]
        self.buffers = Buffers(template)

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
            yield
        finally:
            for i, value in zip(self.inside, before, strict=True):
                template.bind_unit(i, value)
            template.reach(over=self.lease.over)
            for (holder, _), names in zip(template.holders, now, strict=True):
                _fill(holder, names)
            template.serial, template.thread = call


class Buffers:
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
            _fill(holder, {k: v if v is None else copies[id(v)] for k, v in values.items()})


def _fresh(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _copied(value)
    slot, source = value  # a large one: its copy serves if nobody has written to it since
    return slot.work if slot.untouched() and slot.source is source else _copied(source)


def _copied(x: Tensor) -> Tensor:
    """A copy, which nobody else writes to; of what belongs to a graph the tensor itself."""
    return x if x.requires_grad else x.detach().clone()


def _fill(holder: dict[str, Any], values: dict[str, Any]) -> None:
    if holder.keys() != values.keys():
        holder.clear()
    holder.update(values)
