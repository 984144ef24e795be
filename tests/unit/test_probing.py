"""Plans of modules written by hand: what can be split is, and what mixes stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfunc as zf
from tests.laws.plans_by_hand import local_params
from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.probing.plans import plan_of
from zfunc.probing.texts import text_of
from zfunc.trees import tree

WIDTH, HEADS, DIM = 12, 6, 4


class Attention(nn.Module):
    """Grouped heads; ``fused``: queries, keys and values in one weight."""

    def __init__(self, kv: int = 2, fused: bool = False, norm: str = "", mix: bool = False) -> None:
        super().__init__()
        self.kv, self.heads, self.fused, self.mix = kv, HEADS, fused, mix
        sizes = [HEADS * DIM, kv * DIM, kv * DIM]
        if fused:
            self.qkv = nn.Linear(WIDTH, sum(sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, n) for n in sizes)
        self.out = nn.Linear(HEADS * DIM, WIDTH)
        self.norm = nn.LayerNorm(DIM) if norm == "head" else nn.Identity()
        self.over_heads = norm == "head"

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            sizes = [self.heads * DIM, self.kv * DIM, self.kv * DIM]
            q, k, v = self.qkv(x).split(sizes, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.over_heads:
            q = self.norm(q)
        q, k, v = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (q, k, v))
        if self.over_heads:
            q = self.norm(q)
        k, v = (y.repeat_interleave(self.heads // self.kv, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.mix:  # every head sees its neighbour
            y = y + y.roll(1, dims=1)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """``fused``: gates and values side by side, or one after the other."""

    def __init__(self, how: str = "", width: int = 10) -> None:
        super().__init__()
        self.how = how
        if how:
            self.both = nn.Linear(WIDTH, 2 * width)
        else:
            self.gate, self.up = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width, bias=False)
        self.down = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "halves":
            gate, up = self.both(x).chunk(2, dim=-1)
        elif self.how == "pairs":
            gate, up = self.both(x).unflatten(-1, (-1, 2)).unbind(-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A parameter for each neuron lies between, and one for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.each, self.all = nn.Parameter(torch.rand(8) + 1), nn.Parameter(torch.rand(1) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.each * self.all)  # type: ignore[no-any-return]


class Skipped(nn.Module):
    """What the column gives is also the result: nothing can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y + self.down(y.relu())  # type: ignore[no-any-return]


class Lora(nn.Module):
    """A product with a low-rank one beside it."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(a, b), nn.Linear(a, 3, False), nn.Linear(3, b, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Lora(WIDTH, 10), Lora(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Three-dimensional leaves; every text goes to one expert."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.width = width
        self.router = nn.Linear(WIDTH, 3)
        self.experts = Stacked(width)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return self.experts(x, weights)  # type: ignore[no-any-return]


class Stacked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(3, 2 * width, WIDTH))
        self.down = nn.Parameter(torch.randn(3, WIDTH, width))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("btw,efw->bet f".replace(" ", ""), x, self.both).chunk(2, dim=-1)
        y = torch.einsum("betf,ewf->betw", F.silu(gate) * up, self.down)
        return torch.einsum("betw,bte->btw", y, weights)


class Deep(nn.Module):
    """A vocabulary, layers of one kind, and a head; ``tied`` to the table or not."""

    def __init__(self, make: Callable[[], nn.Module], tied: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def functional(make: Callable[[], nn.Module], **how: Any) -> Functional:
    torch.manual_seed(0)
    return zf.functionalize(Deep(make, **how).double().eval())


def run(model: Functional, params: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = tree.flatten_names(params)
    logits = model.apply(params, ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    grads = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    return logits.detach(), dict(zip(leaves, grads, strict=True))


def check(model: Functional, plan: SplitPlan) -> None:
    """Logits and gradients of all ranks are those of one process."""
    ids = torch.randint(1, 11, (3, 7), generator=torch.Generator().manual_seed(5))
    full = tree.flatten_names(model.params)
    whole = tree.map(lambda x: x.detach().clone().requires_grad_(), model.params)
    logits, grads = run(model, whole, ids)
    parts = zf.simulate(plan.ways)(
        lambda: run(model, local_params(model, full, plan, zf.rank()), ids)
    )()
    for rank, (got, own) in enumerate(parts):
        torch.testing.assert_close(got, logits, rtol=1e-9, atol=1e-9)
        for name, g in own.items():
            split = plan.splits.get(name)
            want = grads[name] if split is None else split.local(grads[name], rank)
            torch.testing.assert_close(g, want, rtol=1e-9, atol=1e-9, msg=name)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH)),
    "gated": Gated,
    "gated, halves": lambda: Gated("halves"),
    "gated, pairs": lambda: Gated("pairs"),
    "grouped": Attention,
    "all heads": lambda: Attention(HEADS),
    "one kv head": lambda: Attention(1),
    "fused": lambda: Attention(HEADS, fused=True),
    "fused, one kv head": lambda: Attention(1, fused=True),
    "a norm of heads": lambda: Attention(3, norm="head"),
    "parameters between": Scaled,
    "adapters": Adapted,
    "experts": Experts,
}


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_what_falls_into_pieces_is_split_and_right(name: str, ways: int) -> None:
    model = functional(LAYERS[name])
    plan = plan_of(model, ways)
    layers = [n for n in tree.flatten_names(model.params) if n.startswith("layers.0.")]
    cut = [n for n in layers if n in plan.splits]
    assert len(cut) >= 2, text_of(plan)
    check(model, plan)


def test_everything_that_can_be_is_split() -> None:
    roles = plan_of(functional(Attention), 2).roles
    assert {n: r for n, r in roles.items() if n.startswith("layers.1.")} == {
        "layers.1.q": Role.COLUMN,
        "layers.1.k": Role.COLUMN,
        "layers.1.v": Role.COLUMN,
        "layers.1.out": Role.ROW,
    }
    assert roles["table"] is Role.EMBED and roles["head"] is Role.HEAD


def test_longer_parts_come_first() -> None:
    splits = plan_of(functional(lambda: Attention(HEADS)), 4).splits
    row = splits["layers.0.out.weight"]
    assert (row.dim, [row.width(r) // DIM for r in range(4)]) == (1, [2, 2, 1, 1])


def test_kv_heads_that_are_fewer_than_ranks_stand_on_several() -> None:
    plan = plan_of(functional(lambda: Attention(1)), 3)
    keys, queries = plan.splits["layers.0.k.weight"], plan.splits["layers.0.q.weight"]
    assert keys.shared and not queries.shared
    assert keys.runs == (((0, DIM),),) * 3


def test_numbers_that_a_module_keeps_are_divided() -> None:
    plan = plan_of(functional(lambda: Attention(HEADS, fused=True)), 2)
    assert plan.attributes["layers.0"] == {"heads": (3, 3), "kv": (3, 3)}
    assert plan.numbers["layers.1.heads"] == HEADS


def test_what_lies_between_is_split_by_its_use() -> None:
    plan = plan_of(functional(Scaled), 2)
    assert plan.splits["layers.0.each"].runs == (((0, 4),), ((4, 8),))
    assert "layers.0.all" not in plan.splits
    assert plan.roles["layers.0"] is Role.BETWEEN
    norm = plan_of(functional(LAYERS["a norm of heads"]), 3)
    assert norm.roles["layers.0.norm"] is Role.BETWEEN


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Attention(HEADS, mix=True), "1 independent piece"),
        (Skipped, "the layer's result takes outputs of up"),
        (lambda: nn.Linear(WIDTH, WIDTH), "head is split as the head over the vocabulary"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), "the layer's result takes what it gives"),
    ],
)
@pytest.mark.parametrize("ways", [2, 4])
def test_what_mixes_stays_whole_with_the_reason(
    make: Callable[[], nn.Module], why: str, ways: int
) -> None:
    model = functional(make)
    plan = plan_of(model, ways)
    assert not any(name.startswith("layers.") for name in plan.splits)
    assert any(why in reason for reason in plan.whole.values()), plan.whole
    check(model, plan)


def test_too_few_pieces() -> None:
    plan = plan_of(functional(lambda: Attention(HEADS)), 7)
    assert "layers.0.q.weight" not in plan.splits
    assert "6 independent pieces, and there are 7 ranks" in plan.whole["layers.0.out"]


def test_a_tied_table_is_one_leaf() -> None:
    model = functional(Gated, tied=True)
    plan = plan_of(model, 2)
    assert plan.roles["table"] is Role.EMBED and plan.roles["head"] is Role.HEAD
    assert plan.splits["table.weight"].runs == (((0, 6),), ((6, 11),))
    check(model, plan)
    assert "table.weight" not in plan_of(model, 2, vocab=False).splits


class Read(Deep):
    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.layers[0](self.table(ids)), self.table.weight)


def test_a_table_that_other_code_reads_stays_whole() -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Read(Gated).double())
    plan = plan_of(model, 2)
    assert "table.weight" not in plan.splits and "table" not in plan.roles
    assert "read by other code" in plan.whole["table.weight"]
    assert plan.splits["layers.0.down.weight"].dim == 1


# --- what it costs and leaves alone --------------------------------------------------------------


def test_one_rank_has_everything() -> None:
    plan = plan_of(functional(Gated), 1)
    assert not plan.splits and not plan.roles


def test_a_model_on_meta_has_the_same_plan() -> None:
    here = plan_of(functional(Attention), 2)
    with torch.device("meta"):
        module = Deep(Attention)
    assert plan_of(zf.functionalize(module), 2) == here


def test_nothing_of_the_users_is_touched() -> None:
    module = Deep(lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(), nn.Linear(8, WIDTH)))
    module.register_buffer("count", torch.zeros(()))
    model = zf.functionalize(module.train())
    before = {k: v.clone() for k, v in model.buffers.items()}
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    plan_of(model, 2)
    assert torch.equal(torch.randn(4), expected)
    assert torch.is_grad_enabled() and module.training
    assert all(torch.equal(before[k], x) for k, x in model.buffers.items())
    assert all(x.training for x in model._pool.skeleton.modules())
    assert "forward" not in model._pool.skeleton.layers[0].__dict__


def test_a_large_model_costs_no_more_than_a_small_one() -> None:
    """Layers of a kind are probed once, and in small: 64 of this width would take hours."""
    with torch.device("meta"):
        module = Deep(lambda: Gated(width=1 << 16), depth=64)
    model = zf.functionalize(module)
    plan = plan_of(model, 4)
    assert len(plan.splits) == 64 * 4 + 3


# --- examples ------------------------------------------------------------------------------------


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.layers = nn.Conv2d(3, WIDTH, 4, 4), nn.ModuleList([Attention(), Gated()])

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).mT
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    "example",
    [
        {"pixels": (2, 3, 8, 8)},
        (2, 3, 8, 8),
        torch.ones(2, 3, 8, 8),
        (torch.ones(2, 3, 8, 8),),
        {"pixels": torch.empty(2, 3, 8, 8, device="meta")},
    ],
)
def test_examples_are_tensors_or_shapes(example: Any) -> None:
    plan = plan_of(zf.functionalize(Pictures()), 2, example=example)
    assert {"layers.0.out.weight", "layers.1.down.weight"} <= plan.splits.keys()


class Texts(nn.Module):
    """Ids, kinds of them and a mask, each of which another type is refused for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kinds = nn.Embedding(11, WIDTH), nn.Embedding(2, WIDTH)
        self.layers = nn.ModuleList([Gated(), Gated()])
        self.head = nn.Linear(WIDTH, 11)

    def forward(
        self, ids: Tensor, scale: Any = None, kinds: Any = None, mask: Any = None, late: bool = True
    ) -> Tensor:
        x = self.table(ids)
        x = x if scale is None else x * torch.sigmoid(scale).unsqueeze(-1).log()
        if kinds is not None and not late:
            x = x + self.kinds(kinds)
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
        for layer in self.layers:
            x = x + layer(x)
        if kinds is not None and late:  # when all layers have been called
            x = x + self.kinds(kinds)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    "example",
    [
        (2, 5),
        ((2, 5),),
        {"ids": (2, 5)},
        {"ids": (2, 5), "scale": (2, 5)},
        {"ids": (2, 5), "scale": (2, 5), "kinds": (2, 5)},
        {"ids": (2, 5), "kinds": (2, 5), "late": False},
        ((2, 5), None, (2, 5), torch.ones(2, 5, dtype=torch.bool)),
    ],
    ids=str,
)
def test_a_shape_may_be_that_of_ids(example: Any) -> None:
    plan = plan_of(zf.functionalize(Texts()), 2, example=example)
    assert {"table.weight", "head.weight", "layers.1.down.weight"} <= plan.splits.keys(), plan.whole


def test_of_a_shape_floats_are_tried_first() -> None:
    given = []

    class Noted(Texts):
        def forward(self, ids: Tensor, scale: Any = None, *rest: Any, **more: Any) -> Tensor:
            given.append((ids.dtype, scale.dtype))
            return super().forward(ids, scale, *rest, **more)

    plan_of(zf.functionalize(Noted()), 2, example=((2, 5), (2, 5)))
    assert given[0] == (torch.float64, torch.float64) and given[1] == (torch.int64, torch.float64)
    assert (torch.float64, torch.int64) not in given and (torch.int64, torch.int64) not in given


def test_a_shape_of_neither_says_what_to_write() -> None:
    with pytest.raises(PlacementError) as caught:
        plan_of(zf.functionalize(Texts()), 2, example={"ids": (2, 5), "mask": (2, 5)})
    text = str(caught.value)
    assert text.count("Expected tensor for argument #1 'indices'") == 1, "each reason once"
    assert "with integer ids for ids, mask: " in text
    assert "Shapes were given for ids, mask, and tried as" in text
    assert "example={..., 'mask': torch.ones((2, 5), dtype=torch.bool)}" in text


def test_a_module_that_takes_no_ids_says_so() -> None:
    with pytest.raises(PlacementError, match=r"cannot be called.*integer ids.*example="):
        plan_of(zf.functionalize(Pictures()), 2)


def test_the_plan_in_words() -> None:
    model = functional(lambda: Attention(HEADS, mix=True))
    said = text_of(
        plan_of(model, 2), {k: v.shape for k, v in tree.flatten_names(model.params).items()}
    )
    assert said.startswith("split over 2 ranks: ")
    assert "table.weight: embed, 11 along dimension 0 as 6, 5" in said
    assert "left whole:\n  layers.{0-1}.q: " in said
    grouped = text_of(plan_of(functional(lambda: Attention(1, fused=True)), 2))
    assert "layers.{0-1}.qkv.weight: column, 32 along dimension 0 as 20, 20 in 2 runs" in grouped
    assert "some on several ranks" in grouped
    assert "numbers that differ:\n  layers.{0-1}.heads: 3, 3" in grouped


class Changing(nn.Module):
    """Becomes another module when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = Gated()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, Gated):
            new = nn.Sequential(self.inner.gate, nn.GELU(), self.inner.down)
            self.inner = new
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_layer_that_changes_its_submodules_stays_whole() -> None:
    plan = plan_of(functional(Changing), 2)
    assert not any(name.startswith("layers.") for name in plan.splits)
    assert plan.whole["layers.1"] == "a call puts other submodules into it"


class Twice(nn.Module):
    """Its weight is used again, turned, by code that is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).relu()
        return self.down(y) + F.linear(y.square(), self.up.weight.mT)  # type: ignore[no-any-return]


def test_a_product_whose_weight_other_code_reads_stays_whole() -> None:
    model = functional(Twice)
    plan = plan_of(model, 2)
    assert not any(name.startswith("layers.") for name in plan.splits)
    check(model, plan)


class Borrowing(Attention):
    """Heads are normed by code that takes the weight of a submodule without calling it."""

    def __init__(self) -> None:
        super().__init__(kv=HEADS)
        self.inner = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        given = (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in given)
        q = F.layer_norm(q, (DIM,), self.inner.weight, self.inner.bias)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_parameters_between_that_other_code_reads_keep_products_whole() -> None:
    """Their gradients would be a rank's own: that was so of convolutions of Inkling's keys."""
    model = functional(Borrowing)
    plan = plan_of(model, 2)
    assert "inner.weight is read by other code" in plan.whole["layers.0.out"]
    check(model, plan)


class Biased(nn.Module):
    """A bias for each head comes from outside; ``hand_on``: as a result, too."""

    def __init__(self, hand_on: bool = False) -> None:
        super().__init__()
        self.attention, self.hand_on = Attention(HEADS), hand_on

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        a = self.attention
        q, k, v = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (a.q(x), a.k(x), a.v(x)))
        scores = q @ k.mT + bias.unflatten(0, (x.shape[0], -1))
        y = a.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (y, bias) if self.hand_on else y


class Sloped(nn.Module):
    """Biases of all heads and texts are made once, outside of layers."""

    def __init__(self, hand_on: bool = False) -> None:
        super().__init__()
        self.table, self.slopes = nn.Embedding(11, WIDTH), nn.Parameter(torch.rand(HEADS))
        self.layers = nn.ModuleList(Biased(hand_on) for _ in range(2))
        self.hand_on, self.head = hand_on, nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.table(ids), ids.shape[1]
        places = torch.arange(n, dtype=x.dtype)
        bias = self.slopes[:, None, None] * (places[:, None] - places)
        bias = bias.repeat(ids.shape[0], 1, 1)
        for layer in self.layers:
            out = layer(x, bias)
            y, bias = out if self.hand_on else (out, bias)
            x = x + y
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ways", [2, 4])
def test_arguments_made_for_all_heads_are_taken_in_parts(ways: int) -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Sloped().double().eval())
    plan = plan_of(model, ways)
    assert plan.inputs["layers.0"]["bias"].size == HEADS
    assert "layers.1.attention.q.weight" in plan.splits
    check(model, plan)


def test_arguments_that_a_layer_hands_on_whole_are_not() -> None:
    torch.manual_seed(0)
    model = zf.functionalize(Sloped(hand_on=True).double().eval())
    plan = plan_of(model, 2)
    assert not any(name.startswith("layers.") for name in plan.splits)
    assert "hands on a part for each head" in plan.whole["layers.0.attention.q"]
    check(model, plan)
