"""A module of which some layers are elsewhere, on another stage of a pipeline, or on shapes alone.

A user's hooks of a layer run with it: where it does not run they do not, either. In a rehearsal
they, and methods that a user wrote, leave no trace in Python's state. A library's hooks, which
collect what layers return, see what stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

from torch import nn

from zfunc.engine.primitives import CALLED
from zfunc.modules.binding import Template

__all__ = ["rehearsed"]

_NOTHING: AbstractContextManager[None] = nullcontext()
_OTHERS = frozenset(vars(nn.Module())) | {"forward"}  # parameters, hooks: whoever sets them resets


def rehearsed(template: Template) -> AbstractContextManager[None]:
    """Around a call of a template: where layers may be elsewhere."""
    called = CALLED.get()
    if called is None or (called is False and not any(map(_has_hooks, _layers(template)))):
        return _NOTHING
    return _changed(template, called)


def _layers(template: Template) -> list[nn.Module]:
    return [template.modules[unit.module] for unit in template.anatomy.units]


def _has_hooks(part: nn.Module) -> bool:
    return bool(part._forward_pre_hooks or part._forward_hooks)


@contextmanager
def _changed(template: Template, called: Callable[[Any], Any] | bool) -> Iterator[None]:
    """``called`` makes copies of what a user wrote; False where none are called."""
    forwards, own = list(template.forwards), list[tuple[nn.Module, MethodType]]()
    layers = _layers(template)
    parts = template.modules.values() if callable(called) else layers
    kept = [(part, *_attributes(part)) for part in parts] if callable(called) else []
    before = [
        (hooks, dict(hooks))
        for part in parts
        for hooks in (part._forward_pre_hooks, part._forward_hooks)
        if hooks
    ]
    try:
        if callable(called):
            for hooks, was in before:
                hooks.update({key: called(hook) for key, hook in was.items()})
            free = (part for part in parts if "forward" not in part.__dict__)
            own += ((x, made) for x in free if (made := _method(x, called)) is not None)
            for part, made in own:
                part.__dict__["forward"] = made
        for i, part in enumerate(layers):
            forward = called(forwards[i]) if callable(called) else forwards[i]
            template.forwards[i] = _hooked(part, forward)
        yield
    finally:
        template.forwards[:] = forwards
        for part, _ in own:
            del part.__dict__["forward"]
        for hooks, was in before:
            hooks.clear()
            hooks.update(was)
        for part, values, contents in kept:
            _put_back(part, values, contents)


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


def _hooked(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward between the hooks that a user gave it, which are taken from it."""
    before, behind = _taken(part._forward_pre_hooks), _taken(part._forward_hooks)

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
    if not hooks:
        return {}
    from zfunc.rehearsal.own_copies import is_users  # only where stages have a model

    return {key: hooks.pop(key) for key, hook in tuple(hooks.items()) if is_users(hook)}
