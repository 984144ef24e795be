"""A module of which some layers are elsewhere, on another stage of a pipeline, or on shapes alone.

A user's hooks of a layer run with it: where it does not run they do not, either. In a rehearsal
they, and methods that a user wrote, leave no trace in Python's state. A library's hooks, which
collect what layers return, see what stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

from torch import nn

from zfunc.engine.primitives import CALLED
from zfunc.modules.binding import Template

__all__ = ["rehearsed"]

_NOTHING: AbstractContextManager[None] = nullcontext()
_OTHERS = frozenset(vars(nn.Module())) | {"forward"}  # parameters, hooks
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOKS = (
    *_FORWARD_HOOKS,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def rehearsed(template: Template) -> AbstractContextManager[None]:
    """Around a call of a template: where layers may be elsewhere."""
    called = CALLED.get()
    if called is None:
        return _NOTHING
    if called is not False:
        return _traceless(template, called)
    for part in template.layers:
        if part._forward_pre_hooks or part._forward_hooks:
            return _without_hooks(template)
    return _NOTHING


@contextmanager
def _without_hooks(template: Template) -> Iterator[None]:
    """A block in which a user's hooks of a layer run with it, and nowhere else. What the module
    itself gives and removes meanwhile stays given and removed."""
    forwards, taken = list(template.forwards), list[_Taken]()
    try:
        for i, part in enumerate(template.layers):
            template.forwards[i] = _hooked(part, forwards[i], taken)
        yield
    finally:
        template.forwards[:] = forwards
        for hooks, was in taken:
            hooks.update((key, hook) for key, hook in was.items() if key in hooks)


@contextmanager
def _traceless(template: Template, copies: Any) -> Iterator[None]:
    """A block in which nothing stays of what is done to modules.

    Args:
        copies: has ``of``, which makes copies of what a user wrote; is told in ``changed`` whether
            the module's own state changes between or behind its layers.
    """
    forwards, own = list(template.forwards), list[tuple[nn.Module, MethodType]]()
    layers, parts = template.layers, [*template.modules.values()]
    repeats, place = copies.repeats, id(template.pool)
    kept = [(part, *_attributes(part)) for part in parts]
    rows = [part.__dict__[name] for part in parts for name in _HOOKS]
    before = {i: dict(hooks) for i, hooks in enumerate(rows) if hooks}
    outside, unset = _outside(template), _unset(template)
    states: list[Any] = []

    def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            states.append(_state(template, outside))
            if repeats is None:
                return forward(*args, **kwargs)
            was = repeats.before_layer(states[-1])
            out = forward(*args, **kwargs)
            repeats.behind_layer(was, _state(template, outside))
            return out

        return call

    try:
        for part in parts:
            for name in _FORWARD_HOOKS:
                if hooks := part.__dict__[name]:
                    hooks.update({key: copies.of(hook) for key, hook in hooks.items()})
        free = (part for part in parts if "forward" not in part.__dict__)
        own += ((x, made) for x in free if (made := _method(x, copies.of)) is not None)
        for part, made in own:
            part.__dict__["forward"] = made
        for i, part in enumerate(layers):
            template.forwards[i] = noting(_hooked(part, copies.of(forwards[i]), []))
        if repeats is not None:  # hooks that came in the first call run again where they ran there
            _begin(repeats, place, parts, rows)
            repeats.start(_state(template, outside))
        yield
        end = _state(template, outside)
        for then in states:
            copies.compare(then, end)
        if repeats is not None:
            repeats.before_layer(end)
            repeats.left[place] = list(map(_attributes, parts)), list(map(dict, rows))
    finally:
        template.forwards[:] = forwards
        for part, _ in own:
            del part.__dict__["forward"]
        for i, hooks in enumerate(rows):
            if hooks or i in before:
                hooks.clear()
                hooks.update(before.get(i, {}))
        for part, values, contents in kept:
            _put_back(part, values, contents)
        for holder, name, was in unset:
            holder[name] = was


def _outside(template: Template) -> list[tuple[str, nn.Module]]:
    """The modules that are in no layer, and their paths."""
    layers = tuple(f"{unit.module}." for unit in template.anatomy.units)
    return [each for each in template.modules.items() if not f"{each[0]}.".startswith(layers)]


def _unset(template: Template) -> list[tuple[dict[str, Any], str, Any]]:
    """The buffers that the module has as ``None``, and may fill when it is called; and what is
    there."""
    return [
        (holder, name, holder.get(name))
        for holder, at_rest in template.holders
        for name, x in at_rest.items()
        if x is None
    ]


def _state(template: Template, outside: Sequence[tuple[str, nn.Module]]) -> dict[Any, Any]:
    """What code outside of layers may change: hooks of any module, attributes of those outside.
    Two calls, which may have two templates, tell it by the same names."""
    found, pool = dict[Any, Any](), id(template.pool)
    for path, part in template.modules.items():
        hooks = *part._forward_pre_hooks.values(), *part._forward_hooks.values()
        found[pool, path, f"the hooks of {path or 'the module'}"] = hooks
    for path, part in outside:
        values, contents = _attributes(part)
        for key, x in (_defaults(type(part)) | values | contents).items():
            found[pool, path, f"{type(part).__name__}.{key}"] = x
    return found


def _defaults(kind: type) -> dict[str, Any]:
    """What an attribute is that no instance has set yet."""
    own = [x for x in kind.__mro__ if issubclass(x, nn.Module) and x is not nn.Module]
    rows = (vars(x).items() for x in reversed(own))
    return {key: x for row in rows for key, x in row if isinstance(x, bool | int | float | str)}


def _begin(repeats: Any, place: Any, parts: Sequence[nn.Module], rows: Sequence[Any]) -> None:
    """A second call begins with what the first has left."""
    if not repeats.second or place not in repeats.left:
        return
    states, hooks = repeats.left[place]
    for part, (values, contents) in zip(parts, states, strict=True):
        _put_back(part, values, contents)
    for row, was in zip(rows, hooks, strict=True):
        row.clear()
        row.update(was)


def _attributes(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a module has of its own, and copies of the lists and dicts there: a mask that it makes
    when it is first called is a ghost in a rehearsal."""
    values = {name: x for name, x in vars(part).items() if name not in _OTHERS}
    return values, {name: x.copy() for name, x in values.items() if type(x) in (list, dict)}


def _put_back(part: nn.Module, values: dict[str, Any], contents: dict[str, Any]) -> None:
    for name in vars(part).keys() - values.keys() - _OTHERS:
        del part.__dict__[name]
    part.__dict__.update(values)
    for name, was in contents.items():
        if type(was) is list:
            values[name][:] = was
        else:
            values[name].clear()
            values[name].update(was)


def _method(part: nn.Module, called: Callable[[Any], Any]) -> MethodType | None:
    """The copy of a method that a user wrote, if there is one."""
    made = called(type(part).forward)
    return None if made is type(part).forward else MethodType(made, part)


_Taken = tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]


def _hooked(
    part: nn.Module, forward: Callable[..., Any], taken: list[_Taken]
) -> Callable[..., Any]:
    """A layer's forward between the hooks that a user gave it, which are taken from it."""
    before, behind = _taken(part._forward_pre_hooks), _taken(part._forward_hooks)
    taken += (part._forward_pre_hooks, before), (part._forward_hooks, behind)

    def call(*args: Any, **kwargs: Any) -> Any:
        for key, hook in before.items():
            if key in part._forward_pre_hooks_with_kwargs:
                found = hook(part, args, kwargs)
                args, kwargs = (args, kwargs) if found is None else found
            elif (found := hook(part, args)) is not None:
                args = found if isinstance(found, tuple) else (found,)
        out = forward(*args, **kwargs)
        for key, hook in behind.items():
            named = (kwargs,) if key in part._forward_hooks_with_kwargs else ()
            found = hook(part, args, *named, out)
            out = out if found is None else found
        return out

    return call if before or behind else forward


def _taken(hooks: dict[int, Callable[..., Any]]) -> dict[int, Callable[..., Any]]:
    """A user's hooks. In their places stand some that do nothing: they can be removed."""
    if not hooks:
        return {}
    from zfunc.rehearsal.own_copies import is_users  # only where stages have a model

    found = {key: hook for key, hook in hooks.items() if is_users(hook)}
    hooks.update(dict.fromkeys(found, _nothing))
    return found


def _nothing(*_: Any) -> None:
    """A hook."""
