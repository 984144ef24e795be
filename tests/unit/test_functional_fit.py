"""Back to a module, and params, buffers and modules that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.functional_models import MODULES, WAYS, ConvNet, Counting, Tied, X, at_rest, square
from zfunc import tree
from zfunc.errors import PlacementError
from zfunc.modules.functional import functionalize


def test_to_module_is_the_same_model_with_memory_of_its_own() -> None:
    for make, x in (MODULES["tied"], MODULES["convnet"], MODULES["lstm"]):
        module = make()
        next(module.parameters()).requires_grad_(False)
        f = functionalize(module)
        params = tree.map(lambda p: p * 2, f.params)
        back = f.to_module(params)
        assert type(back) is type(module) and back.training == module.training
        assert list(back.state_dict()) == list(module.state_dict())
        for name, p in back.named_parameters():
            assert torch.equal(p, tree.flatten_names(params)[name])
            assert isinstance(p, nn.Parameter)
            assert p.requires_grad == dict(module.named_parameters())[name].requires_grad
        out, want = back.eval()(x), f.apply(params, x, train=False)
        assert torch.equal(out[0], want[0]) and torch.equal(square(out), square(want))
        with torch.no_grad():
            for p in back.parameters():
                p.zero_()
        assert torch.equal(square(f.apply(params, x, train=False)), square(want))
    tied = functionalize(Tied())
    back = tied.to_module(tied.params)
    assert back.head.weight is back.embed.weight  # type: ignore[union-attr]
    assert back.layers[1].weight is back.layers[2].weight  # type: ignore[index,union-attr]


# --- bad input ---------------------------------------------------------------------------------


def broken(change: Callable[[Any], Any]) -> Any:
    params = tree.map(lambda x: x, functionalize(ConvNet()).params)
    return change(params) or params


MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing": (lambda p: p["head"].pop("bias") is None, r"missing: head\.bias"),
    "missing in a layer": (
        lambda p: p["stages"]["0"][1]["conv"].pop("weight") is None,
        r"missing: stages\.0\.1\.conv\.weight",
    ),
    "unexpected": (lambda p: p["head"].update(extra=X), r"unexpected: head\.extra"),
    "wrong shape": (
        lambda p: p["head"].update(weight=torch.ones(3, 4)),
        r"head\.weight \(3, 4\) instead of \(2, 4\)",
    ),
    "wrong shape in a layer": (
        lambda p: p["stages"]["1"][0]["norm"].update(bias=torch.ones(1)),
        r"stages\.1\.0\.norm\.bias \(1,\) instead of \(4,\)",
    ),
    "too few layers": (lambda p: p["stages"]["1"].pop() and None, r"missing: stages\.1\.1\.conv"),
    "no tensor": (lambda p: p["head"].update(bias=None), r"head\.bias"),
    "flat names": (lambda p: tree.flatten_names(p), "Pass a tree of the structure"),
    "a list": (lambda p: [1, 2, 3], "missing"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_params_that_do_not_fit(name: str) -> None:
    change, message = MISFITS[name]
    f = functionalize(ConvNet())
    for prepare in (WAYS["plain"], WAYS["refs"]):
        with pytest.raises(PlacementError, match=message):
            f.apply(prepare(broken(change)), torch.randn(2, 3, 8, 8))
        at_rest(f)
    if name != "flat names":  # it has the right names, which is all that to_module needs
        with pytest.raises(PlacementError, match=r"missing|unexpected|instead|head"):
            f.to_module(broken(change))


def test_buffers_that_do_not_fit() -> None:
    f = functionalize(Counting())
    with pytest.raises(PlacementError, match=r"missing.*added"):
        f.apply(f.params, X, buffers={"assigned": torch.zeros(())})


class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.all = [self.w]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.all[0]


def test_modules_that_cannot_be_functionalized() -> None:
    ints = nn.Module()
    ints.register_parameter("table", nn.Parameter(torch.ones(2, dtype=torch.int8), False))
    with pytest.raises(PlacementError, match=r"table has dtype torch\.int8.*register_buffer"):
        functionalize(ints)
    with pytest.raises(PlacementError, match=r"weight has no shape yet"):
        functionalize(nn.LazyLinear(3))
    with pytest.raises(PlacementError, match=r"DataParallel.*module\.module"):
        functionalize(nn.DataParallel(nn.Linear(2, 2)))
    f = functionalize(PlainList())
    with pytest.raises(RuntimeError) as caught:
        f.apply(f.params, torch.ones(4))
    assert any("ParameterList" in note for note in caught.value.__notes__)
