"""The modules that Trainer sees in the place of the model, whose parameters lie elsewhere.

While ``train()`` runs, the user's module has no parameters in memory: each is an ``Elsewhere``,
which knows its shape and dtype and raises where its values are asked for. What losses and
evaluations call is a ``Standin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from zfunc.errors import PlacementError

__all__ = ["Elsewhere", "Standin", "buffers_on", "empty", "fill", "holds_all", "homes"]

KNOWN = {"size", "numel", "nelement", "dim", "element_size", "is_floating_point", "is_complex"}
KNOWN |= {"stride", "is_contiguous", "__hash__", "__len__", "__repr__"}
VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that are tensors


class Elsewhere(nn.Parameter):
    """A parameter that is trained elsewhere: its shape, dtype and device can be asked, no more."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # every operation comes here
        name = getattr(func, "__name__", str(func))
        known = name in KNOWN
        if name in ("__get__", "__set__"):
            read, name = name == "__get__", getattr(func.__self__, "__name__", "")
            known = read and name not in VALUES
        if not known and name in ("requires_grad", "requires_grad_"):
            raise PlacementError(
                "requires_grad of a parameter was set during training, whose step was made for "
                "those that were trained in its beginning. Freeze parameters before train(). "
                "peft's disable_adapter() sets it, too: compute what the base model gives before "
                "train(), or with a model of its own."
            )
        if not known:
            raise PlacementError(
                f"{name} was called on a parameter of the model during training, when its values "
                "lie on the ranks as zfunc places them: nothing can read or write them in the "
                "module. trainer.save_model(folder) writes them at any time; after train() they "
                "are in the module again. What changes weights in every step (an average, a "
                "projection) belongs to the optimizer: Trainer(..., optimizer=lambda lr: ...)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Standin(nn.Module):
    """A module that passes calls on, and answers for another in everything else.

    Args:
        owner: gives the module that it stands for.
        call: ``call(training, args, kwargs)``, what a call does.
    """

    _is_accelerate_prepared = True  # it is not wrapped in DistributedDataParallel

    def __init__(
        self, owner: Callable[[], nn.Module], call: Callable[[bool, Any, Any], Any]
    ) -> None:
        super().__init__()
        self.__dict__["owner"], self.__dict__["call"] = owner, call  # no submodules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["call"](self.training, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["owner"](), name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.__dict__["owner"]().named_parameters(*args, **kwargs))

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.__dict__["owner"]().train(mode)
        return self

    def _get_name(self) -> str:
        """The model's own, by which Trainer decides whether labels are shifted."""
        model = self.__dict__["owner"]()
        if hasattr(model, "get_base_model"):  # of peft
            model = model.get_base_model()
        return str(model._get_name())


Homes = dict[str, list[tuple[nn.Module, str]]]


def homes(module: nn.Module) -> Homes:
    """Where a module has its parameters: by the first name of each, all modules and attributes."""
    names: dict[int, str] = {}
    found: Homes = {}
    for prefix, part in module.named_modules():
        for attribute, p in part._parameters.items():
            if p is not None:
                name = names.setdefault(id(p), f"{prefix}.{attribute}" if prefix else attribute)
                found.setdefault(name, []).append((part, attribute))
    return found


def empty(places: Homes) -> None:
    """Let go of the parameters' values."""
    for places_of_one in places.values():
        part, attribute = places_of_one[0]
        p = part._parameters[attribute]
        assert p is not None
        absent = Elsewhere(torch.empty_like(p, device="meta"), p.requires_grad)
        for part, attribute in places_of_one:
            part._parameters[attribute] = absent


def fill(places: Homes, values: dict[str, Tensor], device: torch.device) -> None:
    """Parameters with these values; tied ones are one again."""
    for name, places_of_one in places.items():
        part, attribute = places_of_one[0]
        was = part._parameters[attribute]
        assert was is not None
        value = values[name].detach().to(device, was.dtype)
        p = nn.Parameter(value, requires_grad=was.requires_grad)
        for part, attribute in places_of_one:
            part._parameters[attribute] = p


@contextmanager
def buffers_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A block in which a module's buffers are on a device."""
    old = [(part, dict(part._buffers)) for part in module.modules()]
    for part, buffers in old:
        part._buffers.update(
            {name: None if b is None else b.to(device) for name, b in buffers.items()}
        )
    try:
        yield
    finally:
        for part, buffers in old:
            part._buffers.update(buffers)


def holds_all(module: nn.Module) -> bool:
    """Whether a module's parameters are there."""
    return not any(isinstance(p, Elsewhere) for p in module.parameters())
