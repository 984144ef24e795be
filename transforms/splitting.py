"""``split``: tensor parallelism.

Law: ``unplace(split(f)(place(s), batch)) == f(s, batch)`` up to the rounding of sums over ranks,
bitwise on one rank, where ``f`` computes with split leaves by the functions that are made for them
(``zf.column``, ``zf.row``, ``zf.embed``, ``zf.cross_entropy``), or by a module that was planned.
Whole leaves are the same on all ranks of the axis, bit for bit.

A leaf that a rule names is split along one of its dimensions before any other transform cuts or
sends it, so each of them acts on this rank's part: norms, checkpoints and ``zf.full`` know the full
leaf by its layout (:mod:`zfunc.layout.splits`).

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from threading import Lock
from typing import Any, ClassVar, ParamSpec, Protocol, cast

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zfunc.buffers.heap import return_freed
from zfunc.engine.agreement import check_same
from zfunc.engine.context import Context, current
from zfunc.engine.entries import ROLES, Entries, Roles
from zfunc.engine.hooks import Gradients, Order, Pending
from zfunc.engine.meshed import Meshed
from zfunc.engine.placement import Twins
from zfunc.engine.same_rows import look_anew, note_loss, with_same_rows
from zfunc.engine.step import Differentiate, Transform, Wrap, transform_of
from zfunc.engine.unit_info import Ready, UnitInfo
from zfunc.errors import CompositionError, PlacementError
from zfunc.layout.cutter import Cutter
from zfunc.layout.cutting import make_layout
from zfunc.layout.layout import Layout, whole
from zfunc.layout.pool import pool
from zfunc.layout.readable import Readable
from zfunc.layout.replicated import Replicated, packed
from zfunc.layout.splits import Cut, Part, Split
from zfunc.modules.compilation import check_split
from zfunc.modules.functional import Functional
from zfunc.modules.split_plans import SplitPlan
from zfunc.operators.alike import check_alike
from zfunc.operators.partials import Partials
from zfunc.operators.randomness import apart
from zfunc.probing.plans import plan_of
from zfunc.probing.texts import ModulePlan
from zfunc.quant.model_files import Choose, known, read_files
from zfunc.ranks import world
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.meshes import BATCH, Mesh, laid_out
from zfunc.ranks.world import MESH, world_size
from zfunc.transforms.of_params import of_params
from zfunc.trees import tree
from zfunc.trees.marks import part_of
from zfunc.trees.nodes import NAMESPACE, OPAQUE, Lazy, Tree, leaves_in
from zfunc.trees.tree import dotted

__all__ = ["Splitting", "split"]

Rules = tuple[tuple[str, Cut | None], ...]
# Bytes from which on a leaf lies by itself where split is alone: no flats are sent, and a gradient
# that is copied into one stands beside it at the peak of a step.
ALONE = 1 << 20
_PLANNING = Lock()


@dataclass(frozen=True)
class Splitting(Meshed):
    """See :func:`split`."""

    model: Functional | None = field(default=None, repr=False)
    rules: Rules = ()
    tensor: int | None = None
    mesh: Mesh | None = None
    axis: str = "tensor"
    vocab: bool = True
    example: Any = field(default=None, compare=False, repr=False)
    sequence: bool = False
    roles: Roles = ROLES
    sharded: bool = False  # shard, perhaps that of a pipeline, keeps the state's parts
    of_params: bool = False  # the state is a params tree itself
    plans: dict[Any, SplitPlan] = field(default_factory=dict, compare=False, repr=False)
    choose: Choose | None = field(default=None, compare=False, repr=False)

    position: ClassVar[int] = Order.SPLIT
    by_unit: ClassVar[bool] = True
    represents: ClassVar[bool] = True
    name: ClassVar[str] = "split"

    def __repr__(self) -> str:
        sizes = {} if self.mesh is None else dict(self.mesh.axes)
        more = ", sequence=True" if self.sequence else ""
        return f"split({self.axis}={self.tensor or sizes.get(self.axis, 1)}{more})"

    @property
    def axes(self) -> Mapping[str, int]:
        return {} if self.tensor is None else {self.axis: self.tensor}

    @property
    def on(self) -> Mesh:
        """How the ranks are laid out.

        Raises:
            CompositionError: there are several, and nobody said.
        """
        if self.mesh is not None:
            return laid_out(self.mesh)
        if world_size() > 1:
            raise CompositionError(
                f"split over how many of the {world_size()} ranks? Give tensor=2, say, or "
                "mesh=zf.mesh(data=..., tensor=...)."
            )
        return Mesh((("data", 1), (self.axis, 1)))

    @property
    def group(self) -> Group:
        """The ranks over which leaves are split."""
        return group(self.on, self.axis)

    @property
    def adds_up(self) -> bool:
        """Whether functions run on a stream that is cut: gradients of ranks are parts then.

        Layers of a module take and give what is whole.
        """
        return self.sequence and self.model is None and self.group.size > 1

    def beside(self, others: Sequence[Transform]) -> Splitting:
        shard = next((x for x in others if x.name == "shard"), None)
        pipeline = next((x for x in others if x.name == "pipeline"), None)
        return replace(
            self,
            choose=getattr(pipeline, "choose", None),
            roles=getattr(shard, "roles", self.roles),
            sharded=shard is not None or pipeline is not None,
            of_params=self.of_params or any(other.of_params for other in others),
        )

    # How the state is represented

    def place(self, state: Any) -> Any:
        if self.of_params:
            return self._placed_params(state)
        entries = Entries(state)
        names = self.roles.found("params", entries, self.name)
        check_same(group(self.on, self.on.names), {name: entries[name] for name in entries.names})
        layouts, plan = [make_layout(entries[name]) for name in names], self.plan()
        splits = splits_of(layouts, self.rules, plan, self.group.size)
        twins = Twins([self._told(layout, splits[layout], plan) for layout in layouts])
        for name in entries.names:
            entries[name] = twins.replace(entries[name], self._placed)
        return entries.rebuild()

    def plan(self, grains: Mapping[str, int] | None = None) -> SplitPlan | None:
        """How the model is split over the ranks of the axis; None where there are rules alone.

        Args:
            grains: by the names of leaves, how many of what they sum over share a scale.
        """
        if self.model is None:
            return None
        if self.group.size > 1:
            check_split(self.model._pool.fuses)
        how: Any = {"example": self.example, "vocab": self.vocab, "grains": grains}
        how["sequence"] = self.sequence
        how["whole"] = lambda name: any(fnmatchcase(name, pattern) for pattern, _ in self.rules)
        ways, grained = self.group.size, frozenset((grains or {}).items())
        if (ways, grained) not in self.plans:
            self._find_plan(self.model, ways, grained, how)
        plan = self.plans[ways, grained]
        parts = (plan.splits, plan.roles, plan.attributes, plan.norms, plan.once, plan.between)
        told = hashlib.sha256(repr((*parts, plan.streams, plan.pointwise)).encode())
        if len(set(self.group.exchange(told.hexdigest(), label="plan"))) > 1:
            raise PlacementError(
                "ranks have found different plans for the model: give all of them the same module."
            )
        if self.sequence and ways > 1 and plan.splits and not plan.streams:
            raise PlacementError(_uncut(plan))
        return plan

    def _find_plan(
        self, model: Functional, ways: int, grained: frozenset[tuple[str, int]], how: Any
    ) -> None:
        """Plan, one after the other where ranks are threads."""
        with world.current().busy(), _PLANNING:
            if (ways, grained) in self.plans:
                return
            # It is tried with numbers, also where a step is foreseen, which has none.
            with _disable_current_modes():
                found = contextvars.Context().run(plan_of, model, ways, **how)
            self.plans[ways, grained] = found
            return_freed()  # of the numbers that it tried

    # Parameters alone, for inference

    def _placed_params(self, params: Any) -> Replicated:
        """This rank's parts, as they are: in memory of their own, and in no flats."""
        if isinstance(params, str | os.PathLike):
            how: Any = {"cutter": self.cutter, "choose": self.choose}
            params = read_files(params, known(self.model, params), **how)
        keys, leaves, spec = optree.tree_flatten_with_path(
            params, none_is_leaf=True, namespace=NAMESPACE
        )
        if not any(part_of(x) for x in leaves):  # else they were read as parts
            check_same(group(self.on, self.on.names), {"params": params})
            cutter = self.cutter(params)
            leaves = [
                x if x is None else cutter.local(dotted(*key), x, copy=True)
                for key, x in zip(keys, leaves, strict=True)
            ]
        parted = optree.tree_unflatten(spec, leaves)
        return Replicated(whole(make_layout(parted, by=(self.name, repr(self)))), parted)

    def cutter(self, params: Tree, grains: Mapping[str, int] | None = None) -> Cutter:
        """What takes this rank's parts of a params tree, or of one of its shapes (on ``meta``).

        Args:
            params: the full tree.
            grains: see :meth:`plan`; those of leaves in low bits are known by themselves.
        """
        layout = make_layout(params)
        known = {slot.path: slot.code.grain for slot in layout.present if slot.code is not None}
        plan = self.plan({**known, **(grains or {})})
        splits = splits_of([layout], self.rules, plan, self.group.size)[layout]
        return Cutter(splits, Part(None, self.on, self.axis, plan))

    def _told(self, layout: Layout, splits: Mapping[str, Split], plan: SplitPlan | None) -> Layout:
        """The layout of full leaves, which says how each is to be split."""
        slots = [slot and replace(slot, split=splits.get(slot.path)) for slot in layout.slots]
        return replace(
            layout, slots=tuple(slots), mesh=self.on, along=self.axis, plan=plan, _memo={}
        )

    def _placed(self, layout: Layout, node: Tree) -> Tree:
        """This rank's parts of a full tree, each of which says what it is a part of."""
        leaves = layout.spec.flatten_up_to(node)
        splits = {slot.path: slot.split for slot in layout.present if slot.split is not None}
        cutter = Cutter(splits, Part(None, layout.mesh, self.axis, layout.plan))
        found = [
            x if slot is None or x is None else cutter.local(slot.path, x)
            for x, slot in zip(leaves, layout.slots, strict=True)
        ]
        parted = optree.tree_unflatten(layout.spec, found)
        if self.sharded:
            return parted
        made = make_layout(parted, alone=ALONE, by=(self.name, repr(self)))
        return packed(whole(made), parted)

    def unplace(self, state: Any) -> Any:
        return tree.full(state)

    def check(self, state: Any) -> None:
        entries = Entries({"params": state} if self.of_params else state)
        for name in self.roles.named("params"):
            for node in leaves_in(entries[name], OPAQUE) if name in entries else []:
                if not isinstance(node, Lazy):
                    self._check_node(name, node)

    def _check_node(self, name: str, node: Any) -> None:
        layout = node.layout if isinstance(node, Readable | Replicated) else None
        if layout is None or layout.along != self.axis:
            raise PlacementError(
                f"state entry {name!r} is not split along {self.axis!r}, and {self!r} splits it. "
                "Give the step a state that it placed itself: state = step.place(full_state)."
            )
        ways, size = {s.split.ways for s in layout.present if s.split}, self.group.size
        if not ways and layout.mesh is not None:  # another model's, of which all leaves are whole
            ways = {layout.mesh.sizes.get(self.axis, 1)}
        if ways != {size}:
            raise PlacementError(
                f"state entry {name!r} was split over {ways.pop()} ranks, and axis {self.axis!r} "
                f"has {size} here. `unplace` it there and `place` the result here."
            )

    # One call

    def guard(self, call: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
        if self.sharded:  # shard looks at the rows
            return call(state, args, kwargs)
        return with_same_rows(self.mesh, (), call, state, args, kwargs)

    def configure(self, running: Context, state: Any) -> None:
        running.notes["split"] = self
        if self.mesh is not None:
            MESH.set(self.mesh.closed())

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        """Where the stream is cut gradients add up over ranks, and each begins with 1 / T.

        Losses of the first step are kept until :meth:`finish`, and functions are looked at.
        """
        ranks, first = self.group, "split alike" not in running.memo
        if not self.adds_up and ranks.size == 1:
            return call

        def run(asked: Gradients) -> Any:
            if self.adds_up:
                share = torch.tensor(1.0 / ranks.size, dtype=torch.float64)
                seed = share if asked.seed is None else asked.seed * share.to(asked.seed)
                loss_fn = functools.partial(_drawing_apart, asked.loss_fn, running, ranks)
                asked = replace(asked, loss_fn=loss_fn, seed=seed)
            if first and self.model is None:
                loss_fn = functools.partial(_looked_at, asked.loss_fn, self.axis)
                asked = replace(asked, loss_fn=loss_fn)
            out, grads = call(asked)
            loss = out[0].detach()
            note_loss(self.mesh, loss)
            if first:
                running.notes.setdefault("losses", []).append(loss)
                plain = [x for x in leaves_in(grads, OPAQUE) if isinstance(x, Tensor)]
                running.notes.setdefault("beside", []).extend(x.detach() for x in plain)
            return out, grads

        return run

    def leave(self, value: Pending, unit: UnitInfo) -> Pending:
        """Where the stream is cut each rank has a part of a whole leaf's gradient."""
        if not self.adds_up:
            return value
        rows = zip(unit.trainable, value.wait(), strict=True)
        return Ready([self._added_up(full, i, unit) for i, full in rows])

    def _added_up(self, full: Tensor, i: int, unit: UnitInfo) -> Tensor:
        if any(slot.split is not None for slot in unit.layout.by_flat[i]):
            return full
        if unit.borrowed(i, full):
            full = pool().take(full.numel(), full.dtype, full.device).copy_(full)
        return self.group.all_reduce(full, label="tensor whole leaves").wait()

    def finish(self, old: Any, out: Any) -> Any:
        """After the first step: what ranks of the axis hold alike is alike."""
        running = current()
        if self.of_params or running is None or self.group.size == 1:
            return out
        if "split alike" not in running.memo:
            state = out[0] if isinstance(out, tuple) and out else out
            losses, beside = (running.notes.get(key, []) for key in ("losses", "beside"))
            check_alike(self.group, state, losses, beside, on_positions=self.adds_up)
            running.memo["split alike"] = True
        return out

    # What it says of itself

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        look_anew(self.mesh)
        nodes = [x for x in leaves_in(state, OPAQUE) if isinstance(x, Readable | Replicated)]
        memo["split"] = tuple({node.layout: None for node in nodes})

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        slots = [slot for layout in memo.get("split", ())[:1] for slot in layout.present]
        every = sum(math.prod(slot.full) for slot in slots)
        some = sum(math.prod(slot.full) for slot in slots if slot.split is not None)
        share = f"{100 * some / every:.1f} % of parameters " if every else ""
        whole = sum(slot.split is None for slot in slots)
        told = f"; {whole} leaves whole" if slots else ""
        lines = [f"split: {share}over {self.group.size} ranks of axis {self.axis!r}{told}"]
        plans = (layout.plan for layout in memo.get("split", ()))
        plan = next((x for x in plans if isinstance(x, SplitPlan) and x.streams), None)
        if plan is not None:
            told = f"; {len(plan.uncut)} on the whole stream" if plan.uncut else ""
            lines.append(f"  {len(plan.streams)} layers on positions of the stream{told}")
        return lines


def splits_of(
    layouts: Sequence[Layout], rules: Rules, plan: SplitPlan | None, ways: int
) -> dict[Layout, dict[str, Split]]:
    """For each params tree the splits of its leaves: those of the plan, then those of rules.

    Raises:
        CompositionError: no tree has the leaves of the planned model.
        PlacementError: a rule names no leaf, or one that does not fall into so many parts; or
            nothing is split.
    """
    found: dict[Layout, dict[str, Split]] = {layout: {} for layout in layouts}
    if plan is not None:
        layout, before = _home_of(plan, layouts)
        found[layout] = {before + name: split for name, split in plan.splits.items()}
    used: set[str] = set()
    for layout in layouts if plan is None else ():
        for slot in layout.present:
            fitting = [row for row in rules if fnmatchcase(slot.path, row[0])]
            used.update(pattern for pattern, _ in fitting)
            if fitting and (rule := fitting[0][1]) is not None:
                found[layout][slot.path] = rule.split(slot.own, ways, slot.path)
    paths = [slot.path for layout in layouts for slot in layout.present]
    if plan is not None:
        names = [path.removeprefix(before) for path in paths]
        used = {p for p, _ in rules if any(fnmatchcase(name, p) for name in names)}
    if idle := [pattern for pattern, _ in rules if pattern not in used]:
        raise PlacementError(
            f"rules={{{idle[0]!r}: ...}} names no leaf: the parameters are "
            f"{', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}. Mend the pattern (as in "
            "fnmatch: * stands for any text)."
        )
    if not any(found.values()) and ways > 1:
        told = [f"{name}: {why}" for name, why in (plan.whole.items() if plan else ())][:3]
        raise PlacementError(
            f"nothing is split over {ways} ranks{': ' if told else ''}{'; '.join(told)}. Take "
            "fewer ranks along the axis, or give rules=."
        )
    return found if ways > 1 else {layout: {} for layout in layouts}


def _uncut(plan: SplitPlan) -> str:
    told = [f"{name or 'the module'}: {why}" for name, why in plan.uncut.items()][:3]
    told = told or ["it has none that is split"]
    return (
        f"sequence=True: no layer runs on positions of the stream ({'; '.join(told)}). "
        "Leave sequence=True out: layers are split all the same."
    )


def _home_of(plan: SplitPlan, layouts: Sequence[Layout]) -> tuple[Layout, str]:
    """The params tree that has a planned model's leaves, and how their paths begin there."""
    names, shapes = list(plan.splits), plan.shapes if isinstance(plan, ModulePlan) else {}
    for layout in layouts:
        slots = {slot.path: slot.own for slot in layout.present}
        for path in slots if names else ():
            before = path.removesuffix(names[0])
            if not path.endswith(names[0]) or any(before + name not in slots for name in names):
                continue
            # Other models in the state may have leaves of the same names.
            alike = (
                slots.get(before + name, shape) == tuple(shape) for name, shape in shapes.items()
            )
            if all(alike):
                return layout, before
    if not names:
        return layouts[0], ""
    raise CompositionError(
        f"split was given a model with a leaf {names[0]}, and the state's parameters are "
        f"{', '.join(slot.path for slot in layouts[0].present[:8])}, ...: it is not the model that "
        "the step trains. Give split the model whose params the state has."
    )


def _looked_at(loss_fn: Callable[..., Any], axis: str, *args: Any, **kwargs: Any) -> Any:
    """A loss in which what a rank has of its part alone may not meet parts again."""
    with Partials(axis):
        return loss_fn(*args, **kwargs)


def _drawing_apart(
    loss_fn: Callable[..., Any], running: Context, ranks: Group, *args: Any, **kwargs: Any
) -> Any:
    """A loss whose ranks draw numbers of their own: they have other positions, or other heads."""
    if (layer := running.layer_scope) is None:  # the state has no key
        return loss_fn(*args, **kwargs)
    running.layer_scope = lambda index: layer(index + (ranks.rank << 32))
    with apart(ranks):
        return loss_fn(*args, **kwargs)


P = ParamSpec("P")


class Planning(Wrap[P], Protocol[P]):
    """``split`` itself, and ``split.plan``."""

    plan: Callable[..., SplitPlan]


def _with_plan(wrap: Wrap[P]) -> Planning[P]:
    wrap.plan = plan_of  # type: ignore[attr-defined]
    return cast(Planning[P], wrap)


@_with_plan
@of_params
@transform_of
def split(
    model: Functional | None = None,
    *,
    rules: Mapping[str, Cut | None] | None = None,
    tensor: int | None = None,
    mesh: Mesh | None = None,
    axis: str = "tensor",
    vocab: bool = True,
    sequence: bool = False,
    example: Any = None,
) -> Splitting:
    """Split a step's parameters, and the work with them, over the ranks of a mesh axis.

    Call it as ``split(step, model, tensor=2)``; ``split.plan(model, 2)`` says what is split how.
    Beside ``shard`` each data rank's part of a state is split; alone the step is tensor parallel
    and nothing else.

    For inference it takes a function of parameters in place of a step: a model's ``apply``,
    ``zf.quantize(model.apply, ...)``, or a function that ``zf.evaluate`` was given.
    ``predict.place(params)`` takes the full parameters, or the path of safetensors files, of which
    each rank reads its part, and gives parameters that know how they are split: a model's ``apply``
    and ``zf.generate`` take them as they are, outside of ``predict``, too.

    Args:
        model: the :class:`~zfunc.Functional` that the step applies. Its modules run as they are:
            what can be split is found by probing it with numbers. Without a model ``rules`` name
            the leaves, and the step computes with them by ``zf.column``, ``zf.row``, ``zf.embed``
            and ``zf.cross_entropy``.
        rules: for patterns of leaf paths (``fnmatch``) how these leaves are cut, ``None`` to leave
            them whole. The first pattern that fits counts; leaves that none fits stay whole, or
            are split as the model's plan says.
        tensor: the number of ranks, where no mesh is given; data fills the rest.
        mesh: the ranks by named axes (``zf.mesh(data=2, tensor=2)``).
        axis: the mesh axis to split over.
        vocab: whether a model's table and head are split by the vocabulary.
        sequence: whether norms and the residual stream are cut along positions, dimension -2 of
            what goes between ``zf.row`` and the next ``zf.column`` (Korthikanti et al. 2022): as
            many bytes are sent, and what is kept of the stream for backward is divided by the
            number of ranks. Layers of a module that were tried so run on a rank's positions; what
            its code does between them gets the whole stream, where it looks at more than its
            shape. Outside of steps, and where no gradients are asked for, streams are whole.
            In functions what mixes positions stands between a column and its row, also where both
            are whole leaves. Slice positions of ids and targets, not of the stream; whatever
            joins it and has positions goes through ``zf.operators.positions``. All that a loss
            draws differs from rank to rank.
        example: arguments of the model's ``apply``, tensors or shapes, where it takes more than
            integer ids. A shape is that of floats, or of ids where the model takes no floats.

    Returns:
        A :class:`~zfunc.Step`. Every rank of the axis passes the same rows of a batch
        (``step.local_batch``).

    Raises:
        TypeError: a model or a rule is of another type.
        ValueError: neither a model nor rules; a size that is not positive; an axis along which
            ranks have other rows.
        CompositionError: the step is split already, or has a mesh of another size; when a state is
            placed: its parameters are not those of the model, or the model's layers are compiled.
        PlacementError: when a state is placed: a rule names no leaf, or one that does not fall
            into so many parts; nothing can be split, or under ``sequence`` no layer of the model
            runs on positions. After the first step: ranks have come to
            differ in a leaf that is whole.
    """
    if model is None and not rules:
        raise ValueError("split needs a model (a zf.Functional), or rules for leaves.")
    if model is not None and not isinstance(model, Functional):
        raise TypeError(
            f"split got a {type(model).__name__} for its model; expected what zf.functionalize "
            "made of a module."
        )
    if model is not None and any(rule is not None for rule in (rules or {}).values()):
        raise ValueError(
            "beside a model rules leave leaves whole (None): how others are split its plan says."
        )
    for pattern, rule in (rules or {}).items():
        if rule is not None and not isinstance(rule, Cut):
            raise TypeError(f"rules={{{pattern!r}: {rule!r}}}: expected a zf.Cut, or None.")
    if tensor is not None and (type(tensor) is not int or tensor < 1):
        raise ValueError(f"tensor={tensor!r}: expected how many ranks share a layer, at least 1.")
    if axis in BATCH:
        raise ValueError(
            f"axis={axis!r}: ranks along it have other rows of a batch, and ranks that share a "
            "layer have the same ones. Take another axis of the mesh."
        )
    how = (tensor, mesh, axis, vocab, example, sequence)
    return Splitting(model, tuple((rules or {}).items()), *how)
