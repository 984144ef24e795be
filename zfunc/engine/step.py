"""``Step``, a pure training step, and ``Transform``, what a step can be wrapped in.

A transform is a representation of the state and its rules. It answers some of these
questions, the *hooks*, and overrides only those that it needs:

====================  =========================================================
``place``/``unplace``  how is the state represented? (an isomorphism)
``open``/``finish``    what of it does the function see, and what becomes of the result?
``enter``              how does one unit of parameters get into the computation?
``layer``              what surrounds one layer's compute?
``leave``              how does one unit's gradient get out?
``differentiate``      what surrounds a ``value_and_grad``? and ``evaluate``?
``guard``              what surrounds a whole call? (errors)
====================  =========================================================

At a hook transforms act in the order in which data flows (``position``), never in
that in which the user wrapped them: transforms commute.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, ParamSpec, Protocol, overload

import torch
from torch import Tensor, nn

from zfunc.engine import context
from zfunc.engine.collector import collector_waits
from zfunc.engine.context import Context
from zfunc.engine.entries import admitted, copied, first_leaf, first_placed, held_bytes, key_of
from zfunc.engine.hooks import Description, Gradients, LayerInfo, Order, Pending
from zfunc.engine.interrupts import Succession
from zfunc.engine.signs import listed, signs
from zfunc.errors import CompositionError, PlacementError
from zfunc.ranks import world
from zfunc.ranks.accounting import ledger
from zfunc.ranks.meshes import Mesh, laid_out
from zfunc.ranks.world import MESH, unchecked
from zfunc.trees import tree
from zfunc.trees.memory import without_memory
from zfunc.trees.nodes import Box, leaves_in
from zfunc.trees.origins import let_go

__all__ = ["Step", "Transform", "as_step", "transform_of"]

Differentiate = Callable[[Gradients], tuple[tuple[Tensor, Any], Any]]


HOOKS = "guard", "enter", "layer", "leave"  # at which a step asks who acts at all

# What transforms of users may still override: nobody would call it.
MOVED = {
    "close": "Override `release(self, step)`.",
    "takes": "Override `hold(self, layout, tree)`, which returns the node or None.",
    "own_step": "Override `apart` of a `zfunc.trees.reduction.Reduction`.",
    "reduce": "Let `configure` set `running.reduction`, a `zfunc.trees.reduction.Reduction`.",
    "settle": "Let `configure` set `running.reduction`, a `zfunc.trees.reduction.Reduction`.",
    "wraps_layers": "Whoever overrides `layer` is asked.",
}


class Transform:
    """Base of all transforms. Subclass it as a frozen dataclass to write your own.

    Attributes:
        position: where on the way of the data it acts; see :class:`~zfunc.engine.hooks.Order`.
        before_gather: whether ``enter`` acts on what is stored, before it is gathered.
        by_unit: whether layers must come as references even if nothing enters or leaves.
        by_layer: whether it does well only if each layer is a unit of its own.
        represents: whether ``place`` makes the state's representation (and a copy of it).
        needs_gradients: whether a step that never differentiates is an error.
        of_params: whether the state is a params tree itself, and the function no training step.
        spends: whether the state that goes in may be gone before the caller has the result.
        mesh: how the ranks are laid out; see :class:`~zfunc.engine.meshed.Meshed`.
        averages: the mesh's axes along which ranks have other rows of a batch, if it averages.
        acts_at: those of "guard", "enter", "layer" and "leave" at which this kind does anything.
    """

    position: ClassVar[int] = Order.OTHERS
    before_gather: ClassVar[bool] = False
    by_unit: ClassVar[bool] = False
    by_layer: ClassVar[bool] = False
    represents: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = False
    spends: ClassVar[bool] = False
    of_params: bool = False
    mesh: Mesh | None = None
    averages: tuple[str, ...] = ()
    acts_at: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in MOVED.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old}: zf.Transform has no such member. {new}")
        cls.acts_at = frozenset(x for x in HOOKS if getattr(cls, x) is not getattr(Transform, x))

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        return self.name

    def on_mesh(self, transforms: Sequence[Transform]) -> Transform:
        """This transform on the one mesh of all of a step's transforms."""
        return self

    def beside(self, others: Sequence[Transform]) -> Transform:
        """This transform, given the others that the step is wrapped in.

        Raises:
            CompositionError: they make no sense together; says what to write instead.
        """
        return self

    def place(self, state: Any) -> Any:
        """The state in this transform's representation; never aliases its input."""
        return state

    def unplace(self, state: Any) -> Any:
        """The inverse of ``place``."""
        return state

    def parts(self, placed: Any) -> list[Any]:
        """States like ``placed``, of the full state's structure, that hold all its tensors.

        Where ``place`` keeps a leaf twice, or changes the structure: ``step.init`` writes
        each leaf of the full state into its counterpart in every part. ``None`` in a part
        stands for what the others hold.
        """
        return [placed]

    def hold(self, layout: Any, tree: Any) -> Any:
        """The node that stands for a plain tree whose parts are not to be in the device's memory.

        Args:
            layout: a :class:`~zfunc.layout.layout.Layout`, by which another transform cuts it.

        Returns:
            ``None`` where they may be.
        """
        return None

    def check(self, state: Any) -> None:
        """Raise ``PlacementError`` if the state is not in this representation."""

    def configure(self, running: Context, state: Any) -> None:
        """Prepare the context of one call of the step on ``state``."""

    def open(self, state: Any) -> Any:
        """The state as the function is to see it: without what this transform carries in it."""
        return state

    def foresee(self, plan: Sequence[tuple[int, int]], owner: Any) -> Sequence[tuple[int, int]]:
        """The order in which units are expected to enter the :class:`Pass` about to run."""
        return plan

    def enter(self, value: Pending, unit: Any) -> Pending:
        """Let the parameters of one unit (a :class:`UnitInfo`) in."""
        return value

    def layer(self, call: Callable[..., Any], info: LayerInfo) -> Callable[..., Any]:
        """Surround one layer: ``call(*inputs)`` runs it."""
        return call

    def leave(self, value: Pending, unit: Any) -> Pending:
        """Let the gradients of one unit (a :class:`UnitInfo`) out."""
        return value

    def differentiate(self, call: Differentiate, running: Context) -> Differentiate:
        """Surround one ``value_and_grad``: ``call(asked)`` gives ``((loss, aux), grads)``.

        The transform nearest to storage is the innermost.
        """
        return call

    def evaluate(self, call: Callable[..., Any], running: Context) -> Callable[..., Any]:
        """Surround one ``zf.evaluate``: ``call(fn, params, args, kwargs)`` runs it."""
        return call

    def finish(self, old: Any, out: Any) -> Any:
        """Put the result of a call in order; ``old`` is what ``open`` was given."""
        return out

    def guard(self, call: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
        """Surround one whole call: ``call(state, args, kwargs)``, the state as the caller has it.

        For what concerns the caller and no value: how errors reach him.
        """
        return call(state, args, kwargs)

    def obstacle(self) -> str | None:
        """Why a step in it cannot be one CUDA graph (``zf.captured``), or None if it can."""
        return None

    def expect(self, state: Any, memo: dict[Any, Any]) -> None:
        """Note in the step's memo what ``describe`` needs of a state just placed."""

    def describe(self, memo: Mapping[Any, Any]) -> list[str]:
        """Lines for ``step.describe()``."""
        return []

    def release(self, step: Step) -> None:
        """Release what the transform holds for a step: files, locks, memory."""


@dataclass(frozen=True)
class Step:
    """A pure training step: ``step(state, batch) -> (state, metrics)``.

    A value: it can be printed, compared, pickled and wrapped further. What it
    remembers from call to call (the order in which units enter) belongs to the world.

    Attributes:
        fn: the user's function. Given a step, this one is the same under more transforms.
        transforms: in data-flow order.
        tx: the optimizer, where it is known.
    """

    fn: Callable[..., Any]
    transforms: tuple[Transform, ...] = ()
    tx: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(fn := self.fn, Step):
            fn = functools.reduce(Step.wrap, self.transforms, fn)
            vars(self).update(vars(fn), tx=fn.tx if self.tx is None else self.tx)
        names = ("__name__", "__doc__", "__module__", "__qualname__")
        told = {name: getattr(self.fn, name) for name in names if hasattr(self.fn, name)}
        vars(self).update(told, __wrapped__=self.fn)

    def __hash__(self) -> int:
        try:
            fn = hash(self.fn)
        except TypeError:  # a callable with fields (a dataclass, say) may have none
            fn = id(self.fn)
        return hash((fn, self.transforms))

    def __repr__(self) -> str:
        text = getattr(self.fn, "__name__", repr(self.fn))
        for transform in self.transforms:
            text = f"{transform!r}({text})"
        return text

    def _repr_html_(self) -> str:
        return Description(repr(self))._repr_html_()

    def wrap(self, transform: Transform) -> Step:
        """This step under one more transform.

        Raises:
            CompositionError: it has a transform of that kind already, one that makes no sense
                beside this one, or one that has another mesh.
        """
        for mine in self.transforms:
            if type(mine) is type(transform):
                raise CompositionError(
                    f"this step is wrapped in {mine.name} already ({mine!r}). A transform acts "
                    f"once: give {mine.name} its final arguments in one place."
                )
        ordered = sorted((*self.transforms, transform), key=lambda t: t.position)
        ordered = [t.on_mesh(ordered) for t in ordered]
        met = [t.beside([other for other in ordered if other is not t]) for t in ordered]
        return replace(self, transforms=tuple(met))

    @property
    def mesh(self) -> Mesh | None:
        """How the ranks are laid out; ``None`` is all of them along ``"data"``."""
        return next((t.mesh for t in self.transforms if t.mesh is not None), None)

    def local_batch(self, batch: Any) -> Any:
        """``zf.local_batch`` on the step's mesh: this rank's rows of a global batch.

        Raises:
            ValueError: the mesh does not cover this world.

        >>> Step(len).local_batch([torch.arange(4)])
        [tensor([0, 1, 2, 3])]
        """
        from zfunc.engine.batches import local_batch  # for this alone

        return local_batch(batch, self.mesh)

    # One call

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(transform.spends for transform in self.transforms):
            return self.guarded(self._call)(state, args, kwargs)
        succession = Succession(self.guarded(self._call), state, args, kwargs)
        while True:  # in the outermost frame: see Succession
            try:
                return operator.call(succession.result)
            except BaseException as error:
                if succession.may_raise(error):
                    raise

    def guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call(state, args, kwargs)``, a call of this step, inside its transforms' guards."""
        for transform in self.transforms:
            if "guard" in transform.acts_at:
                call = functools.partial(transform.guard, call)
        return call

    def _call(self, state: Any, args: Any, kwargs: Any) -> Any:
        (state, tensors, boxes), memo = admitted(state), self._memo()
        if "mesh" not in memo:  # that of the rank, whose memory it is
            self._check_mesh()
            memo["mesh"] = True
        self._check(state, memo)
        running = Context(
            transforms=self.transforms,
            memo=memo,
            tensors=tensors,
            boxes=boxes,
            key=key_of(state),
            by_unit=any(
                t.by_unit or not t.acts_at.isdisjoint(("enter", "leave")) for t in self.transforms
            ),
        )
        token, outer = context.push(running), MESH.set(MESH.get())
        try:
            with ledger(complete=False) as sent, unchecked():
                out = self._run(running, state, args, kwargs)
        finally:
            MESH.reset(outer)
            context.pop(token)
        memo["sent"] = sent
        made = first_leaf(out[0] if isinstance(out, tuple) and out else out)
        memo["made"] = weakref.ref(made) if isinstance(made, Tensor | Box | tree.Placed) else None
        return out

    def _run(self, running: Context, state: Any, args: Any, kwargs: Any) -> Any:
        """Open the state from storage outwards, call the function, finish the way back."""
        given = []
        for transform in self.transforms:
            transform.configure(running, state)
            given.append(state)
            state = transform.open(state)
        out = self.fn(state, *args, **kwargs)
        needed = any(t.needs_gradients for t in self.transforms)
        if needed and not running.differentiated and not any(t.of_params for t in self.transforms):
            raise CompositionError(
                f"{getattr(self.fn, '__name__', 'the step')} never called zf.value_and_grad, so "
                "its gradients were never averaged over the ranks. Differentiate with "
                "zf.value_and_grad(loss_fn)(params, batch), or evaluate with zf.evaluate(fn)."
            )
        for transform, old in zip(reversed(self.transforms), reversed(given), strict=True):
            out = transform.finish(old, out)
        return out

    def _check_mesh(self) -> None:
        """Raise if the mesh does not cover this world, or nothing averages over its rows."""
        on = laid_out(given := self.mesh)
        if given is None or any(t.averages or t.of_params for t in self.transforms):
            return
        if on.batch and on.size(on.batch) > 1:
            told = f"on {on} ranks have other rows of a batch, and {self!r} averages over none: "
            raise CompositionError(f"{told}they would drift apart. Wrap the step in zf.shard.")

    def _check(self, state: Any, memo: Mapping[Any, Any]) -> None:
        """Raise ``PlacementError`` if another composition has placed the state."""
        made = memo.get("made")
        if made is None or made() is not first_leaf(state):  # what this step returned is its own
            self._check_signs(state)
        try:
            for transform in self.transforms:
                transform.check(state)
        except PlacementError as error:
            raise PlacementError(
                f"{error} (The state was placed by {listed(signs(state))}; this step is {self!r}.)"
            ) from None

    def _check_signs(self, state: Any) -> None:
        found = signs(state)
        mine = [transform.name for transform in self.transforms]
        if foreign := [name for name in found if name not in mine]:
            raise PlacementError(
                f"this state was placed by another step: {listed(found)}; this step is {self!r}, "
                f"without {' and '.join(foreign)}. Call the step that placed it, or take the state "
                "back with its `unplace` and `place` the result here."
            )
        if not any(t.represents for t in self.transforms) and (path := first_placed(state)):
            raise PlacementError(
                f"this state was placed by another step ({path} is): {self!r} takes plain trees. "
                "Call the step that placed it, or take the state back with its `unplace`."
            )

    def _memo(self) -> dict[Any, Any]:
        memos = world.current().memo.setdefault("steps", weakref.WeakKeyDictionary())
        return memos.setdefault(self, {})

    # Representations

    @collector_waits()
    def place(self, state: Any) -> Any:
        """This rank's representation of a full state; shares no memory with it.

        A functionalized module whose parameters a training state has holds them no longer: they
        leave memory unless somebody else holds them. (Simulated ranks share them, and leave them
        there, and so does inference, whose full parameters are the reference.)

        Raises:
            PlacementError: the state is placed already, or has no params.
            ValueError: the step's mesh does not cover this world.
        """
        if torch.is_inference_mode_enabled():  # a copy made in it could not be differentiated
            with torch.inference_mode(False), torch.no_grad():
                return self.place(state)
        self._check_mesh()
        state, *_ = admitted(state)
        if found := first_placed(state):
            raise PlacementError(
                f"{found} is placed already. `place` takes a full state: pass the one it was made "
                "from, or `step.unplace(state)`."
            )
        placed = self._noted(self._placed(state))
        inference = any(t.of_params for t in self.transforms)
        if not inference and not world.current().threads:  # others place the same parameters yet
            let_go(leaves_in(state))
        return placed

    def _noted(self, placed: Any) -> Any:
        memo = self._memo()
        before = dict(memo)
        memo["held"] = held_bytes(placed)
        for transform in self.transforms:
            transform.expect(placed, memo)
        noted = {key: memo[key] for key in memo if before.get(key) is not memo[key]}
        memo["noted"] = {**memo.get("noted", {}), **noted}
        return placed

    def _placed(self, state: Any) -> Any:
        token, memo = context.PLACING.set(self), self._memo()
        memo["placing"], memo["given"] = state, without_memory(state)
        memo.setdefault("noted", {})["given"] = memo["given"]
        try:
            for transform in reversed(self.transforms):
                state = transform.place(state)
        finally:
            context.PLACING.reset(token)
            del memo["placing"]
        return state if any(t.represents for t in self.transforms) else copied(state)

    def unplace(self, state: Any) -> Any:
        """The full state, bitwise what ``place`` was given; a collective."""
        tree.check_alive(state)
        for transform in self.transforms:
            state = transform.unplace(state)
        return tree.full(state)

    def init(self, make_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``place(make_state(*args))`` without ever holding the full state.

        Raises:
            PlacementError: the initialiser does something that cannot be replayed leaf
                by leaf (it reads values, say); the message names the operation.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.init(make_state, *args, **kwargs)
        self._check_mesh()
        from zfunc.initialisation.placing import init  # a room of its own, for this alone

        return self._noted(init(self._placed, self._parts, make_state, args, kwargs))

    def _parts(self, placed: Any) -> list[Any]:
        """The parts of a placed state, from storage outwards."""
        found = [placed]
        for transform in self.transforms:
            found = [part for state in found for part in transform.parts(state)]
        return found

    def describe(self, batch: Any = None) -> Description:
        """What this step does and costs, as text (and as attributes of the text).

        Bytes of the state are known once one is placed, those sent once the step has run. With
        ``batch``, what this rank would pass to it, the step on the state that was placed last is
        foreseen (``zf.foresee``): bytes sent, FLOPs, and the peak of tensors.
        """
        from zfunc.foresight.description import describe  # for this alone

        return describe(self, self._memo(), batch)

    def close(self) -> None:
        """Release files, locks, rings and streams; the step can be used again."""
        for transform in self.transforms:
            transform.release(self)

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@world.on_renewal.append
def _forget() -> None:
    """What steps have learnt on their way: ranks that were broken off differ in it.

    They all know what follows from the states that they have placed.
    """
    for memo in world.current().memo.get("steps", {}).values():
        noted = memo.get("noted", {})
        memo.clear()
        memo.update(noted, noted=noted)


def as_step(fn: Callable[..., Any]) -> Step:
    """A function as a step; steps pass through."""
    return fn if isinstance(fn, Step) else Step(fn)


P = ParamSpec("P")


class Wrap(Protocol[P]):
    """What a transform is to its users: ``transform(step, ...)`` and ``@transform(...)``."""

    @overload
    def __call__(self, step: Callable[..., Any], /, *args: P.args, **kwargs: P.kwargs) -> Step: ...

    @overload
    def __call__(
        self, step: None = None, /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[Callable[..., Any]], Step]: ...


def transform_of(make: Callable[P, Transform]) -> Wrap[P]:
    """Turn a transform's constructor into ``transform(step, ...)`` and ``@transform(...)``."""

    @functools.wraps(make)
    def wrap(step: Callable[..., Any] | None = None, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        made = make(*args, **kwargs)
        if step is None:
            return lambda fn: as_step(fn).wrap(made)
        if not callable(step) or isinstance(step, nn.Module):
            raise TypeError(
                f"{make.__name__}() got a {type(step).__name__}; expected the step to wrap, a "
                "function (state, batch) -> (state, metrics). As a decorator: "
                f"@{make.__name__}(...=...)."
            )
        return as_step(step).wrap(made)

    signature = inspect.signature(make)
    rest = list(signature.parameters.values())
    needed = any(parameter.default is parameter.empty for parameter in rest)
    default = inspect.Parameter.empty if needed else None  # the one would forbid the other
    first = inspect.Parameter("step", inspect.Parameter.POSITIONAL_ONLY, default=default)
    wrap.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first, *rest]
    )
    return wrap
