"""Random models: trees of tensors with functions on them, and modules.

Each runs under zfunc and in plain torch by the same lines (see ``running``): ``errors`` gives the
loss of every row. All numbers of a model follow from its seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import named, numbers
from tests.laws.fuzz.running import RUN, Noting, Plain
from tests.laws.test_random_trees import Two, visit
from zfunc import tree

__all__ = ["KINDS", "PARTED", "Model", "model_of"]

F64 = torch.float64
Run = Noting | Plain


@dataclass(frozen=True)
class Model:
    """What all kinds have.

    Attributes:
        seed: of its structure and numbers.
        noisy: whether its layers draw random numbers.
        layers: whether it has a stack that ``drop_layers`` may leave layers out of.
        buffered: whether a step changes buffers.
        smooth: whether no gradient is zero but for rounding, so that signs of gradients say
            something.
        recast: whether it computes in the dtype of its parameters.
    """

    seed: int
    noisy: bool = False

    layers = True
    buffered = False
    smooth = True
    recast = False
    least_rows = 1

    def params(self) -> Any:
        raise NotImplementedError

    def buffers(self) -> Any:
        return None

    def batch(self, i: int, rows: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def errors(
        self, params: Any, batch: Any, run: Run, key: Any = None, buffers: Any = None
    ) -> tuple[Tensor, Any]:
        """The loss of each row, ``[rows]``, and the buffers after it."""
        raise NotImplementedError


def rows_of(i: int, rows: int, width: int) -> dict[str, Tensor]:
    return {
        "x": numbers((rows, width), 1000 + i, F64, 1.0),
        "y": numbers((rows, 1), 2000 + i, F64, 1.0),
    }


@dataclass(frozen=True)
class Stack(Model):
    """Residual layers of unlike leaves, called in an order of their own, in a tree with more."""

    recast = True

    @cached_property
    def plan(self) -> Any:
        draw = random.Random(self.seed)
        depth, width = draw.choice([1, 2, 3, 3, 4, 6]), draw.choice([1, 2, 3, 5, 6, 6])
        order = [(i, True) for i in range(depth)]
        if draw.random() < 0.3:
            order.pop(draw.randrange(depth))  # a layer that nobody uses
        if order and draw.random() < 0.3:
            order.append(draw.choice(order))  # one that is used again
        if draw.random() < 0.2:
            i = draw.randrange(depth)
            order = [(k, through and k != i) for k, through in order]  # one read directly
        extras = [
            [name for name in ("gain", "spare", "none", "empty", "wide") if draw.random() < 0.25]
            for _ in range(depth)
        ]
        alike = draw.random() < 0.5  # only stacks of one structure are merged
        rest = draw.choice(["", "", "used", "unused"])
        return depth, width, order, [extras[0]] * depth if alike else extras, rest

    def params(self) -> Any:
        _, width, _, extras, rest = self.plan
        at = iter(range(10_000 + 100 * self.seed, 1 << 60))

        def leaf(*shape: int, scale: float = 0.5) -> Tensor:
            return numbers(shape, next(at), F64, scale)

        def layer(names: list[str]) -> Any:
            p: dict[str, Any] = {"w": leaf(width, width), "b": leaf(width, scale=0.1)}
            more = {"gain": (), "spare": (3,), "empty": (0, width), "wide": (width, 9)}
            p.update((name, leaf(*more[name])) for name in names if name in more)
            return {**p, "none": None} if "none" in names else p

        out = {
            "first": {"w": leaf(width, width), "b": leaf(width, scale=0.1)},
            "blocks": zf.Layers([layer(names) for names in extras]),
            "head": {"w": leaf(width, 1), "again": leaf(width, 1)},
        }
        if rest:
            out["rest"] = [Two(leaf(2, 3), leaf()), (leaf(1), {"z": leaf(7), "a": leaf(0)})]
        return out

    def batch(self, i: int, rows: int) -> dict[str, Tensor]:
        return rows_of(self.seed % 50 + i, rows, self.plan[1])

    def errors(
        self, params: Any, batch: Any, run: Run, key: Any = None, buffers: Any = None
    ) -> tuple[Tensor, Any]:
        depth, _, order, _, rest = self.plan
        x = run.keyed(batch["x"].to(params["first"]["w"].dtype), key)
        x = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
        seen: dict[int, int] = {}
        for i, through in order:
            seen[i] = seen.get(i, -1) + 1
            site = f"{i} {seen[i]}" if self.noisy else ""

            def block(p: Any, x: Tensor, site: str = site) -> Tensor:
                y = torch.tanh(x @ p["w"] + p["b"])
                if "gain" in p:
                    y = y * p["gain"]
                if "wide" in p:
                    y = y + 0.1 * p["wide"].sum(1)
                return x + (run.noise(site, y) if site else y)

            p = params["blocks"][i]
            if through:
                x = run.through(lambda x, p=p, f=block: run.layer(f, p, x), i, depth, x)
            else:
                x = block(p, x)
        out = x @ params["head"]["w"] + 0.1 * (x * x) @ params["head"]["again"]
        if rest == "used":
            for p in tree.leaves(params["rest"]):
                out = out + torch.sin(p).sum().to(out.dtype)
        y = batch["y"].to(out.dtype)
        return (out - y).square().mean(1), None


@dataclass(frozen=True)
class Parted(Model):
    """Residual layers whose inner features tensor ranks may share, beside leaves that are whole."""

    recast = True

    @cached_property
    def plan(self) -> tuple[int, int, list[int]]:
        draw = random.Random(self.seed)
        depth, width = draw.choice([1, 2, 3]), draw.choice([1, 2, 5, 6])
        return depth, width, [draw.choice([4, 5, 7, 9]) for _ in range(depth)]

    def params(self) -> Any:
        _, width, inner = self.plan
        at = iter(range(30_000 + 100 * self.seed, 1 << 60))

        def leaf(*shape: int, scale: float = 0.5) -> Tensor:
            return numbers(shape, next(at), F64, scale)

        def layer(n: int) -> dict[str, Tensor]:
            first = {"up": leaf(n, width), "up_bias": leaf(n, scale=0.1), "gain": leaf(n)}
            return {**first, "down": leaf(width, n), "bias": leaf(width, scale=0.1)}

        return {
            "first": {"w": leaf(width, width), "b": leaf(width, scale=0.1)},
            "blocks": zf.Layers(map(layer, inner)),
            "head": leaf(width, 1),
        }

    def batch(self, i: int, rows: int) -> dict[str, Tensor]:
        return rows_of(self.seed % 50 + i, rows, self.plan[1])

    def errors(
        self, params: Any, batch: Any, run: Run, key: Any = None, buffers: Any = None
    ) -> tuple[Tensor, Any]:
        plain = isinstance(run, Plain)
        column, row = (F.linear, F.linear) if plain else (zf.column, zf.row)
        x = run.keyed(batch["x"].to(params["first"]["w"].dtype), key)
        x = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
        for i, p in enumerate(params["blocks"]):
            site = str(i) if self.noisy else ""

            def block(p: Any, x: Tensor, site: str = site) -> Tensor:
                hidden = torch.tanh(column(x, p["up"], p["up_bias"])) * p["gain"]
                y = row(hidden, p["down"], p["bias"])
                return x + (run.noise(site, y) if site else y)

            x = run.through(lambda x, p=p, f=block: run.layer(f, p, x), i, self.plan[0], x)
        y = batch["y"].to(x.dtype)
        return (x @ params["head"] - y).square().mean(1), None


PARTED = {  # how it is split
    "blocks.*.up*": zf.Cut(0),
    "blocks.*.gain": zf.Cut(0),
    "blocks.*.down": zf.Cut(1),
}


@dataclass(frozen=True)
class Tree(Model):
    """Any nest of dicts, lists, tuples, layers and nothing, of tensors of any shape."""

    layers = False

    def params(self) -> Any:
        draw = random.Random(self.seed)
        at = iter(range(20_000 + 100 * self.seed, 1 << 60))

        def leaf() -> Tensor | None:
            if draw.random() < 0.1:
                return None
            shape = draw.choice([(), (1,), (0,), (3,), (3,), (2, 2), (5, 1), (7, 3), (4, 0), (64,)])
            return numbers(shape, next(at), F64) + 0.1

        def node(depth: int) -> Any:
            kind = draw.randrange(8) if depth else 0
            size = draw.choice([0, 1, 2, 3])
            if kind == 1:
                return [node(depth - 1) for _ in range(size)]
            if kind == 2:
                return tuple(node(depth - 1) for _ in range(size))
            if kind == 3:
                return zf.Layers([node(depth - 1) for _ in range(size)])
            if kind == 4:
                return Two(node(depth - 1), node(depth - 1))
            if kind >= 5:
                keys = draw.sample(["a", "b", "a.b", "c", "__x"], size)
                return {key: node(depth - 1) for key in keys}
            return leaf()

        while True:  # until all leaves have names of their own: the plain loop tells them by these
            made = {"one": numbers((3,), next(at), F64), "tree": node(3), "more": node(2)}
            if len({*tree.paths(made)}) == len(tree.paths(made)):
                return made

    def batch(self, i: int, rows: int) -> dict[str, Tensor]:
        return {"x": numbers((rows,), 3000 + self.seed % 50 + i, F64) + 1.5}

    def errors(
        self, params: Any, batch: Any, run: Run, key: Any = None, buffers: Any = None
    ) -> tuple[Tensor, Any]:
        x = run.keyed(batch["x"], key)
        return visit(params, x.mean() * 0, run.layer) * torch.sin(x) + x.square(), None


class Block(nn.Module):
    """A residual layer of one of several kinds."""

    def __init__(self, kind: str, width: int, site: str) -> None:
        super().__init__()
        self.site = site
        if kind == "batch":
            self.body: Any = nn.Sequential(
                nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.Tanh()
            )
        elif kind == "attention":
            how: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            # No biases: that of the keys changes nothing, and its gradient is rounding alone.
            self.body = nn.TransformerEncoderLayer(width, 2, 2 * width + 1, bias=False, **how)
        else:
            self.body = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width + 1),
                nn.GELU(),
                nn.Linear(2 * width + 1, width, bias=kind == "biased"),
            )
        self.adds = kind != "attention"

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.site:
            y = RUN.get().noise(self.site, y)
        return x + y if self.adds else y


class Net(nn.Module):
    """Blocks between an entry and a head."""

    def __init__(self, seed: int, kind: str, noisy: bool) -> None:
        super().__init__()
        draw = random.Random(seed)
        width, depth = draw.choice([2, 4, 6]), draw.choice([1, 2, 3, 4])
        self.ids = kind == "attention"
        self.entry: Any = nn.Embedding(11, width) if self.ids else nn.Linear(5, width)
        sites = [str(i) if noisy else "" for i in range(depth)]
        self.blocks = nn.ModuleList([Block(kind, width, site) for site in sites])
        self.head = nn.Linear(width, 11 if self.ids else 1, bias=not self.ids)
        if self.ids and draw.random() < 0.6:
            self.head.weight = self.entry.weight
        elif draw.random() < 0.3 and depth > 1 and kind == "biased":
            self.blocks[-1].body[1].weight = self.blocks[0].body[1].weight
        if draw.random() < 0.4:
            self.unused = nn.Linear(3, 2)
        if draw.random() < 0.3:
            self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        run, of = RUN.get(), len(self.blocks)
        x = self.entry(x) + self.shift
        for i, block in enumerate(self.blocks):
            x = run.through(block, i, of, x)
        if hasattr(self, "scale"):
            x = x * self.scale
        return self.head(x)


@dataclass(frozen=True)
class Module(Model):
    """A functionalized module; in plain torch ``torch.func.functional_call`` runs it."""

    kind: str = "biased"

    @property
    def buffered(self) -> bool:  # type: ignore[override]
        return self.kind == "batch"

    @property
    def smooth(self) -> bool:  # type: ignore[override]
        return self.kind != "batch"

    @property
    def least_rows(self) -> int:  # type: ignore[override]
        return 4 if self.kind == "batch" else 1

    @cached_property
    def net(self) -> Net:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Net(self.seed, self.kind, self.noisy).double().train()

    @cached_property
    def functional(self) -> zf.Functional:
        return zf.functionalize(self.net)

    def params(self) -> Any:
        return self.functional.params

    def buffers(self) -> Any:
        return self.functional.buffers

    def batch(self, i: int, rows: int) -> dict[str, Tensor]:
        i += self.seed % 50
        if not self.net.ids:
            return rows_of(i, rows, 5)
        ids = (numbers((rows, 6), 4000 + i, F64, 5.0).long().abs() + i) % 11
        return {"x": ids[:, :5], "y": ids[:, 1:]}

    def errors(
        self, params: Any, batch: Any, run: Run, key: Any = None, buffers: Any = None
    ) -> tuple[Tensor, Any]:
        RUN.set(run)
        x = batch["x"] if self.net.ids else run.keyed(batch["x"], key)
        buffers = self.buffers() if buffers is None else buffers
        if isinstance(run, Plain):
            held = {path: b.clone() for path, b in named(buffers).items()}
            state = {**{k: p for k, p in named(params).items() if p is not None}, **held}
            out = torch.func.functional_call(self.net, state, (x,), tie_weights=True)
        elif self.buffered and torch.is_grad_enabled():
            out, held = self.functional.apply(params, x, buffers=buffers, mutable=True)
        else:
            out, held = self.functional.apply(params, x, buffers=buffers), buffers
        if self.net.ids:
            each = F.cross_entropy(out.transpose(1, 2), batch["y"], reduction="none")
            return each.mean(1), held
        return (out - batch["y"]).square().mean(1), held


KINDS = {
    "stack": Stack,
    "tree": Tree,
    "biased": Module,
    "bare": Module,
    "batch": Module,
    "attention": Module,
    "parted": Parted,
}


def model_of(kind: str, seed: int, noisy: bool) -> Model:
    """The model of a kind and a seed."""
    if KINDS[kind] is Module:
        return Module(seed, noisy, kind)
    return KINDS[kind](seed, noisy)


def rebuilt(params: Any, leaves: dict[str, Tensor]) -> Any:
    """A plain tree like ``params`` of other leaves, by path."""
    paths = list(named(params))
    spec = optree.tree_structure(params, none_is_leaf=True, namespace=tree.NAMESPACE)
    return optree.tree_unflatten(spec, [leaves.get(path) for path in paths])
