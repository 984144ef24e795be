"""A warning for a model that is trained in eval mode, in which its dropout does nothing.

``from_pretrained`` gives a module in eval mode, and ``functionalize`` keeps every submodule's mode.
Who differentiates such a module is told once that its dropout is off. That is found in three ways:
modules that are dropout; probabilities that modules keep under a name with "drop" in it, since
attention kernels are given 0 in eval mode; and calls of functional dropout in the first loss.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from zfunc.engine.primitives import Ref
from zfunc.modules.lazy import LazyTensor
from zfunc.trees.nodes import OPAQUE, Tree, leaves_in

__all__ = ["DROPOUTS", "DropoutCheck", "probability"]

# Names of functions in F and torch, some of which have an in-place form: (input, p, training).
DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"]
DROPOUTS += ["feature_alpha_dropout", "native_dropout"]


class DropoutCheck:
    """What is known of one module's dropout; asked until it has been differentiated once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.open = any(not part.training for part in module.modules())

    def watched(self, entered: Tree) -> AbstractContextManager[Any]:
        """Around a call of the module in its own mode; warns if its dropout should be on.

        Args:
            entered: the parameters of the call. Only those that are differentiated decide: a
                teacher in eval mode is as it should be.
        """
        if not (self.open and torch.is_grad_enabled() and _differentiated(entered)):
            return nullcontext()
        self.open = False
        found = next(_idle(self.module), None)
        if found is None:
            return self._watched()
        self._warn(found, 4)
        return nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with _DropoutWatch() as watch:
            yield
        if watch.found is not None:
            self._warn(watch.found, 5)

    def _warn(self, where: str, depth: int) -> None:
        warnings.warn(
            f"zfunc: {type(self.module).__name__} is differentiated in eval mode, in which its "
            f"dropout ({where}) does nothing. from_pretrained leaves a model so. To train with "
            "dropout: functionalize(model, train=True), or apply(..., train=True); train=False "
            "says that it is to be off.",
            stacklevel=depth,
        )


def _differentiated(entered: Tree) -> bool:
    return any(
        x.differentiated if isinstance(x, Ref) else isinstance(x, Tensor) and x.requires_grad
        for x in leaves_in(entered, OPAQUE)
    )


def _idle(module: nn.Module) -> Iterator[str]:
    """Where in a module dropout is off, outside parts that are frozen as a whole."""
    for top, part in _off("", module):
        for name, inner in part.named_modules():
            if not inner.training and (kept := probability(inner)) is not None:
                yield ".".join(filter(None, (top, name, kept)))


def _off(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The largest parts in eval mode that are trained."""
    if not module.training:
        if _is_trained(module):
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _off(f"{name}.{child_name}" if name else child_name, child)


def _is_trained(module: nn.Module) -> bool:
    return any(
        p.trains if isinstance(p, LazyTensor) else p.requires_grad for p in module.parameters()
    )


def probability(module: Any) -> str | None:
    """How a module names a probability of dropout above 0: empty if it is a dropout itself."""
    if isinstance(module, _DropoutNd):
        return "" if module.p > 0 else None
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:
        return None  # nothing lies between its layers
    for name, value in module.__dict__.items():
        if type(value) is float and 0 < value <= 1 and "drop" in name:
            return name
    return None


class _DropoutWatch(TorchFunctionMode):
    """Looks for functional dropout that is off in a module that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is None and (p := _switched_off(func, args, kwargs)) > 0:
            callers = _callers(sys._getframe(1))
            if _is_off(callers):
                kind = f"a {type(callers[0]).__name__}" if callers else "a module"
                self.found = f"{func.__name__}, p={p:g}, in {kind}"
        return func(*args, **kwargs)


def _switched_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability of a functional dropout that is told to be off; 0 for all other calls."""
    if func is F.multi_head_attention_forward:
        given = {"p": args[10:11], "training": args[13:14]}
    elif getattr(func, "__name__", "").rstrip("_") in DROPOUTS:
        given = {"p": args[1:2], "training": args[2:3]}
    else:
        return 0.0
    named = {"dropout_p": "p", "train": "training"}
    found = {name: value for name, values in given.items() for value in values}
    found |= {named.get(name, name): value for name, value in kwargs.items()}
    return 0.0 if found.get("training", True) else float(found.get("p", 0.5))


def _callers(frame: FrameType | None) -> list[nn.Module]:
    """The modules whose methods are running, from the innermost on."""
    found = []
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), nn.Module):
            found.append(owner)
        frame = frame.f_back
    return found


def _is_off(callers: list[nn.Module]) -> bool:
    """Whether dropout in the innermost of these modules is off with a part that is trained."""
    if callers and callers[0].training:
        return False  # on purpose
    # A module that is nothing but dropout has no parameters: what it is a part of decides.
    part = next((m for m in callers if next(m.parameters(), None) is not None), None)
    return part is None or _is_trained(part)
