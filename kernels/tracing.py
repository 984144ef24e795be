"""Telling ``torch.compile`` about autograd Functions without importing it.

Dynamo takes a ``Function`` into a graph under ``torch.func`` only if it was told so, by a
function of a module that takes a second to import: more than all of zfunc. So it is told when
somebody else imports it, which ``torch.compile`` does before it traces anything.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TypeVar

import torch

__all__ = ["in_graph"]

DYNAMO = "torch._dynamo"
F = TypeVar("F", bound=type[torch.autograd.Function])
_waiting: list[type[torch.autograd.Function]] = []


def in_graph(function: F) -> F:
    """A class decorator: ``torch.compile`` puts calls of this Function into its graph whole."""
    dynamo = sys.modules.get(DYNAMO)
    if hasattr(dynamo, "allow_in_graph"):
        dynamo.allow_in_graph(function)  # type: ignore[union-attr]
    else:
        _waiting.append(function)
        if not any(isinstance(finder, _Dynamo) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Dynamo())
    return function


class _Dynamo(MetaPathFinder):
    """Finds dynamo as it would be found otherwise, and says what is waiting once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                while _waiting:
                    module.allow_in_graph(_waiting.pop())

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec
