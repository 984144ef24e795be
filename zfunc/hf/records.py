"""Whether a module is still what it was when ``train()`` made a step of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from zfunc.errors import PlacementError

__all__ = ["Record"]

PLAIN = (bool, int, float, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Record:
    """What of a module its copy has taken over: plain attributes, hooks and buffers.

    The step runs the copy, so that a change of the module would be ignored.
    """

    def __init__(self, module: nn.Module) -> None:
        self._known: dict[bool, dict[str, Any]] = {}
        mode = module.training
        for training in (not mode, mode):  # which a module may note in attributes of its own
            module.train(training)
            self._known[training] = _traits(module)

    def check(self, module: nn.Module) -> None:
        """Raise ``PlacementError`` if the module is no longer what it was."""
        now = _traits(module)
        for name, was in self._known[module.training].items():
            if (is_now := now.get(name, "nothing")) != was:
                change = "" if name.endswith(HOOKS) else f" from {_short(was)} to {_short(is_now)}"
                raise PlacementError(
                    f"{name} of the model was changed{change} during train(), whose step runs a "
                    "copy of the model and would not see it. Change it before train(); what a "
                    "forward is to know of the step belongs to its inputs, or to a buffer that "
                    "is changed in place."
                )


def _traits(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, x in vars(part).items():
            if isinstance(x, PLAIN) and name != "training":
                found[start + name] = x
            elif name in HOOKS or (
                isinstance(x, list | tuple) and all(isinstance(y, PLAIN) for y in x)
            ):
                found[start + name] = tuple(x)
        for name, b in part._buffers.items():
            found[start + name] = id(b)
    return found


def _short(x: Any) -> str:
    return repr(x)[:40]
