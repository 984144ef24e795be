"""What a batch may be made of: ``zf.local_batch`` and ``accumulate`` cut it alike, or refuse it."""

from __future__ import annotations

import collections
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc import optim

transformers = pytest.importorskip("transformers")

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6.0)


class ReadOnly(Mapping[str, Any]):
    """A mapping whose copy shares its items."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Marked(dict[str, Any]):
    """A dict with something beside its items."""

    source = "train"


class Closed(Mapping[str, Any]):
    """A mapping that nobody can make anew."""

    def __init__(self) -> None:
        super().__init__()

    def __getitem__(self, key: str) -> Any:
        return {"x": X, "y": Y}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("x", "y"))

    def __len__(self) -> int:
        return 2


@dataclass(frozen=True)
class Pair:
    x: Any
    y: Any
    name: str = "train"


Named = collections.namedtuple("Named", ["x", "y"])

MADE: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "BatchEncoding": lambda **kw: transformers.BatchEncoding(kw),
    "BatchFeature": lambda **kw: transformers.BatchFeature(kw),
    "UserDict": lambda **kw: UserDict(kw),
    "dict's child": lambda **kw: Marked(kw),
    "OrderedDict": collections.OrderedDict,
    "read-only": lambda **kw: ReadOnly(kw),
    "proxy": lambda **kw: types.MappingProxyType(kw),
    "dataclass": Pair,
    "named tuple": Named,
}
LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "tensors": lambda x: x,
    "arrays": lambda x: x.numpy(),
    "nested": lambda x: {"inner": [UserDict({"it": x})]},
}


def inner(value: Any) -> Tensor:
    while not isinstance(value, Tensor | np.ndarray):
        value = value["inner"][0]["it"]
    return torch.as_tensor(value)


def read(batch: Any, name: str) -> Tensor:
    return inner(batch[name] if isinstance(batch, Mapping) else getattr(batch, name))


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("kind", MADE)
def test_each_rank_has_its_rows(kind: str, leaves: str) -> None:
    batch = MADE[kind](x=LEAVES[leaves](X), y=LEAVES[leaves](Y))
    parts = zf.simulate(4)(lambda: zf.local_batch(batch))()
    for name, whole in (("x", X), ("y", Y)):
        assert [len(read(part, name)) for part in parts] == [1, 2, 1, 2]
        assert torch.equal(torch.cat([read(part, name) for part in parts]), whole)
        assert torch.equal(read(batch, name), whole)  # nobody wrote into the batch itself
        assert read(parts[0], name).data_ptr() == whole.data_ptr()
    assert all(type(part) is type(batch) for part in parts)


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("kind", MADE)
def test_each_microbatch_has_its_rows(kind: str, leaves: str) -> None:
    seen = []
    batch = MADE[kind](x=LEAVES[leaves](X), y=LEAVES[leaves](Y))

    def loss(params: Any, given: Any) -> Tensor:
        seen.append(given)
        return (read(given, "x") @ params["w"] - read(given, "y")).square().mean()

    tx = optim.sgd(0.1)
    state = zf.TrainState.create({"w": torch.ones(2)}, tx)
    one, metrics = zf.accumulate(zf.train_step(loss, tx), 3)(state, batch)
    assert [type(part) for part in seen] == [type(batch)] * 3
    assert torch.equal(torch.cat([read(part, "x") for part in seen]), X)
    seen.clear()
    other, expected = zf.train_step(loss, tx)(state, batch)
    torch.testing.assert_close(metrics["loss"], expected["loss"])
    torch.testing.assert_close(one.params["w"], other.params["w"])


def test_what_a_mapping_has_beside_its_items() -> None:
    rows = [types.SimpleNamespace(n_sequences=1, tokens=[f"{i}"]) for i in range(6)]
    batch = transformers.BatchEncoding({"x": X}, encoding=rows)
    first, second = zf.simulate(2)(lambda: zf.local_batch(batch))()
    assert first.tokens(2) == ["2"] and second.tokens(0) == ["3"]
    assert len(first.encodings) == 3 and len(batch.encodings) == 6
    marked = Marked(x=X)
    marked.source = "test"
    assert zf.simulate(2)(lambda: zf.local_batch(marked))()[1].source == "test"


def test_what_has_no_rows_is_passed_on() -> None:
    batch = {
        "x": X, "scale": torch.tensor(2.0), "n": 3, "rate": 0.5, "on": True, "none": None,
        "name": "train", "dtype": torch.float16, "number": np.float32(1.0), "0-d": np.array(1.0),
        "size": (224, 224), "words": ["a", "b"], "shape": X.shape,
    }  # fmt: skip
    for part in zf.simulate(2)(lambda: zf.local_batch(batch))():
        assert {k: v for k, v in part.items() if k != "x"} == {
            k: v for k, v in batch.items() if k != "x"
        }
        assert len(part["x"]) == 3
    assert zf.local_batch({"rate": 0.5}) == {"rate": 0.5}


class Unknown:
    """Something with tensors in it of which nothing is known."""

    def __init__(self) -> None:
        self.x = X


REFUSED: dict[str, tuple[Any, str]] = {
    "strings": ({"x": X, "text": ["a"] * 6}, r"text, a list of str, as long as .* rows \(6\)"),
    "nested strings": ({"x": X, "meta": {"id": ("a",) * 6}}, r"meta\.id, a tuple of str, as long"),
    "numbers": (UserDict(x=X, label=[0] * 6), "label, a list of int, as long"),
    "0-d tensors": ({"x": X, "y": list(torch.ones(6))}, "y, a list of Tensor, as long"),
    "ids": ({"x": X, "ids": [[1, 2]] * 6}, "ids, a list of list, as long"),
    "an object": ({"x": X, "more": [Unknown()]}, r"more\.0, an Unknown\."),
    "a set": ({"x": X, "more": {1, 2}}, "more, a set"),
    "a generator": ({"x": X, "more": iter("ab")}, "more, a str_"),
    "closed": (Closed(), "a Closed cannot be made anew"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_named(kind: str) -> None:
    batch, message = REFUSED[kind]
    for ranks in (1, 3):
        with pytest.raises(zf.PlacementError, match=message):
            zf.simulate(ranks)(lambda: zf.local_batch(batch))()

    def loss(params: Any, given: Any) -> Tensor:
        return (given["x"] @ params["w"]).sum()

    tx = optim.sgd(0.1)
    step = zf.accumulate(zf.train_step(loss, tx), 2)
    with pytest.raises((zf.CompositionError, zf.PlacementError), match=message):
        step(zf.TrainState.create({"w": torch.ones(2)}, tx), batch)


@pytest.mark.parametrize(
    "batch", [["a", "b"], ("a",), transformers.BatchEncoding({"input_ids": [[1, 2], [3, 4]]})]
)
def test_a_batch_without_tensors(batch: Any) -> None:
    """A tokenizer's, say, without ``return_tensors``."""
    with pytest.raises(zf.PlacementError, match="each rank would get all of it"):
        zf.local_batch(batch)
    tx = optim.sgd(0.1)
    step = zf.accumulate(zf.train_step(lambda p, b: p["w"].sum(), tx), 2)
    with pytest.raises(zf.CompositionError, match=rf"\(b is an? {type(batch).__name__}"):
        step(zf.TrainState.create({"w": torch.ones(2)}, tx), batch)


def test_what_a_loss_takes_beside_its_batch() -> None:
    """Functions, modules, and trees of the state are no part of it."""
    tx = optim.sgd(0.1)
    state = zf.TrainState.create({"w": torch.ones(2)}, tx, aux={"shift": torch.ones(4, 2)})
    model = torch.nn.Linear(2, 2).requires_grad_(False)

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any, b: Any, f: Any, module: Any, aux: Any, options: Any) -> Tensor:
            assert len(b) == 3 and aux["shift"].shape == (4, 2) and options == {"on": True}
            return (module(f(b)) @ p["w"]).mean()

        return state, zf.value_and_grad(loss)(
            state.params, batch, torch.tanh, model, state.aux, {"on": True}
        )

    _, (loss, _) = zf.accumulate(step, 2)(state, X)
    torch.testing.assert_close(loss, step(state, X[:3])[1][0] / 2 + step(state, X[3:])[1][0] / 2)


class Attributes(dict[str, Any]):
    """Its items are its attributes, too, as in many configuration classes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


def test_items_that_are_attributes_are_cut_as_both() -> None:
    part = zf.simulate(2)(lambda: zf.local_batch(Attributes(x=X)))()[1]
    assert type(part) is Attributes and part.x is part["x"]
    torch.testing.assert_close(part.x, X[3:])


def test_a_queue_of_strings_is_no_part_of_a_batch() -> None:
    with pytest.raises(zf.PlacementError, match="texts"):
        zf.simulate(2)(lambda: zf.local_batch({"x": X, "texts": deque("abcdef")}))()
