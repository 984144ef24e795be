"""``train_step(skip_unused=True)``: a leaf that nobody used rests, as torch's without a gradient.

The judge is one plain torch process in float64 that sees the batches of all ranks side by side:
``torch.optim`` after ``zero_grad(set_to_none=True)``, which counts the steps of each parameter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.cases import regression
from tests.laws.covering import STAGES, each, pairs
from tests.laws.models import stack, stack_loss
from zfunc import optim

F64 = torch.float64
ROWS, WIDTH, EXPERTS = 12, 6, 4
# To which expert each row goes. Three ranks of two microbatches have two rows each.
ROUTES = [
    [0, 1] * 6,  # 2 and 3 are used by nobody, and have never been
    [2, 2] + [0] * 10,  # 2 in the first microbatch of the first rank alone; 1 and 3 rest
    [1] * 11 + [3],  # 3 in the last one of the last rank; 0 and 2 rest
    [0, 1, 2, 3] * 3,  # all
    [2] * 12,  # one
    [1, 1] * 3 + [0, 0] * 3,
]


class Routed(nn.Module):
    """Experts that are called for their rows alone; leaves used seldom, never, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5 + k), nn.Tanh(), nn.Linear(5 + k, WIDTH))
            for k in range(EXPERTS)
        )
        self.rare, self.never = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor([-0.0, 2.0]))
        self.still = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        x = self.stem(x) * self.still
        out = x
        for k, expert in enumerate(self.experts):
            rows = (to == k).nonzero()[:, 0]
            if len(rows):
                found = expert(x[rows]) * (self.rare.mean() if k == 3 else 1)
                out = out.index_put((rows,), x[rows] + found)
        return self.head(out)


def made() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Routed().double()


MODULE = made()


def batch_of(i: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(i)
    x = torch.randn(ROWS, WIDTH, generator=drawn, dtype=F64)
    return {"x": x, "to": torch.tensor(ROUTES[i % len(ROUTES)])}


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, written out."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.sign(mean * 0.9 + p.grad * 0.1) * group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


def is_expert(path: str) -> bool:
    return path.startswith("experts")


def by_label(params: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    fast = [p for name, p in params if is_expert(name)]
    slow = [p for name, p in params if not is_expert(name)]
    return [torch.optim.AdamW(fast, 0.02, weight_decay=0.1), torch.optim.SGD(slow, 0.1, 0.9)]


def decaying(params: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    groups = [
        {"params": [p for name, p in params if is_expert(name) == on], "weight_decay": decay}
        for on, decay in ((True, 0.1), (False, 0.0))
    ]
    return [torch.optim.AdamW(groups, 0.02)]


def only(how: Callable[..., torch.optim.Optimizer], *args: Any, **kw: Any) -> Any:
    return lambda params: [how([p for _, p in params], *args, **kw)]


def falling(count: Any) -> Tensor:
    return 0.02 * 0.8 ** torch.as_tensor(count, dtype=F64)


CLIP = 0.5
Case = tuple[Callable[[], Any], Callable[[Any], list[torch.optim.Optimizer]]]
CASES: dict[str, Case] = {
    "adamw": (
        lambda: optim.adamw(0.02, weight_decay=0.1),
        only(torch.optim.AdamW, 0.02, weight_decay=0.1),
    ),
    "adam": (lambda: optim.adam(0.02), only(torch.optim.Adam, 0.02)),
    "clipped": (
        lambda: optim.chain(optim.clip_by_global_norm(CLIP), optim.adamw(0.02, weight_decay=0.1)),
        only(torch.optim.AdamW, 0.02, weight_decay=0.1),
    ),
    "mask": (lambda: optim.adamw(0.02, weight_decay=0.1, mask=is_expert), decaying),
    "labels": (
        lambda: optim.multi_transform(
            {"fast": optim.adamw(0.02, weight_decay=0.1), "slow": optim.sgd(0.1, 0.9)},
            lambda path: "fast" if is_expert(path) else "slow",
        ),
        by_label,
    ),
    "schedule": (
        lambda: optim.adamw(falling, weight_decay=0.1),
        only(torch.optim.AdamW, 0.02, weight_decay=0.1),
    ),
    "sgd": (lambda: optim.sgd(0.1), only(torch.optim.SGD, 0.1)),
    "momentum": (lambda: optim.sgd(0.1, 0.9), only(torch.optim.SGD, 0.1, 0.9)),
    "nesterov": (
        lambda: optim.sgd(0.1, 0.9, nesterov=True),
        only(torch.optim.SGD, 0.1, 0.9, nesterov=True),
    ),
    "decayed sgd": (
        lambda: optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1, 0.9)),
        only(torch.optim.SGD, 0.1, 0.9, weight_decay=0.1),
    ),
    "decay last": (
        lambda: optim.chain(optim.adam(0.02), optim.add_decayed_weights(-0.002)),
        only(torch.optim.AdamW, 0.02, weight_decay=0.1),
    ),
    "lion": (lambda: optim.lion(0.02, weight_decay=0.1), only(Lion, 0.02, 0.1)),
    "decay masked": (
        lambda: optim.chain(
            optim.adam(0.02), optim.masked(optim.add_decayed_weights(-0.002), is_expert)
        ),
        decaying,
    ),
}
MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}


@functools.cache
def judged(case: str, steps: int = len(ROUTES)) -> tuple[list[dict[str, Tensor]], list[set[str]]]:
    """Parameters and moments after each step, and which leaves each has used."""
    module = copy.deepcopy(MODULE)
    params = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizers = CASES[case][1](params)
    states, used = [], []
    for i in range(steps):
        module.zero_grad(set_to_none=True)
        module(**batch_of(i)).square().mean().backward()
        if case == "clipped":
            grads = [p.grad for _, p in params if p.grad is not None]
            norm = torch.cat([g.flatten() for g in grads]).norm()
            torch._foreach_mul_(grads, min(1.0, CLIP / float(norm)))
        for optimizer in optimizers:
            for group in optimizer.param_groups if case == "schedule" else ():
                group["lr"] = float(falling(i))
            optimizer.step()
        used.append({name for name, p in params if p.grad is not None})
        states.append({name: p.detach().clone() for name, p in params})
        for name, p in params:
            for optimizer in optimizers:
                for what, x in optimizer.state.get(p, {}).items():
                    if what in MOMENTS and x is not None:
                        states[-1][f"{MOMENTS[what]} {name}"] = x.clone()
    return states, used


def found_in(full: Any) -> dict[str, Tensor]:
    """Parameters and moments of a full state by name."""
    out = zf.tree.flatten_names(full.params)
    left = [full.opt_state]
    while left:
        node = left.pop()
        for what in set(getattr(node, "_fields", ())) & {"mu", "nu", "trace"}:
            if getattr(node, what) is not None:
                rows = zf.tree.flatten_names(getattr(node, what))
                out.update({f"{what} {name}": x for name, x in rows.items()})
        left += node.values() if isinstance(node, dict) else node if isinstance(node, tuple) else ()
    return out


def loss_of(f: Any) -> Any:
    def loss(params: Any, batch: Any) -> zf.Mean:
        out = f.apply(params, batch["x"].to(f.params["head"]["weight"].dtype), batch["to"])
        return zf.Mean(out.square().sum(), out.numel())

    return loss


def stepped(
    case: str, stage: int | None, wraps: Iterable[Any] = (), skip: bool = True, **how: Any
) -> Any:
    f = zf.functionalize(MODULE, units=how.pop("units", None), train=True)
    tx = CASES[case][0]()
    step: Any = zf.train_step(loss_of(f), tx, skip_unused=skip)
    for wrap in wraps:
        step = wrap(step)
    if stage is not None:
        step = zf.shard(step, stage=stage, **how)
    return step, zf.TrainState.create(f.params, tx)


def run_of(
    case: str, stage: int | None, wraps: Iterable[Any] = (), skip: bool = True, **how: Any
) -> Iterator[dict[str, Tensor]]:
    """Parameters and moments before the first step and after each."""
    step, state = stepped(case, stage, wraps, skip, **how)
    with step:
        state = step.place(state)
        yield found_in(step.unplace(state))
        for i in range(len(ROUTES)):
            state, _ = step(state, zf.local_batch(batch_of(i)))
            yield found_in(step.unplace(state))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def compare(rows: Iterable[dict[str, Tensor]], case: str, near: float = 1e-10) -> None:
    states, used = judged(case)
    before: dict[str, Tensor] = {}
    for i, now in enumerate(rows):
        for name, x in now.items():
            if i == 0:
                continue
            wanted = states[i - 1].get(name)
            if wanted is not None:
                assert torch.allclose(x.double(), wanted, atol=near, rtol=0), (i, name)
            if name.split()[-1] not in used[i - 1]:
                assert same_bits(x, before[name]), (i, name)
        before = now
    assert {*states[-1]} <= {*before}


def test_that_the_judge_has_leaves_that_rest() -> None:
    _, used = judged("adamw")
    assert all("never" not in row for row in used) and "rare" in used[2]
    assert [sum("experts.2.0.weight" in row for row in used), len(used)] == [3, 6]
    with pytest.raises(AssertionError):
        compare(run_of("adamw", None, skip=False), "adamw")


@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_in_one_process(case: str) -> None:
    compare(run_of(case, None), case)


UNITS = "experts.*"


@pytest.mark.parametrize(("case", "stage", "ranks"), pairs(("adamw", "labels"), STAGES, (1, 2, 3)))
def test_stages_and_ranks(case: str, stage: int, ranks: int) -> None:
    def body() -> None:
        compare(run_of(case, stage, units=UNITS if ranks == 3 else None), case)

    zf.simulate(ranks)(body)()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_optimizers_on_two_ranks(stage: int) -> None:
    def body() -> None:
        for case in [name for name in CASES if name not in ("adamw", "labels")][stage::2]:
            compare(run_of(case, stage, unit_bytes=500), case)

    zf.simulate(2)(body)()


halves = zf.transforms.accumulate(n=2)
WRAPS: dict[str, tuple[list[Any], int]] = {
    "accumulate": ([halves], 3),
    "donate": ([zf.transforms.donate()], 2),
    "accumulate, donate": ([halves, zf.transforms.donate()], 2),
    "remat": ([zf.transforms.remat()], 2),
    "precision": ([zf.transforms.precision(compute=F64, reduce=F64)], 2),
    "precision, donate": (
        [zf.transforms.precision(compute=F64, reduce=F64), zf.transforms.donate()],
        2,
    ),
    "offload": ([zf.transforms.offload(to="cpu")], 2),
}


@pytest.mark.parametrize(
    ("what", "stage", "case"), each(WRAPS, STAGES, ("clipped", "labels"), times=2)
)
def test_under_other_transforms(what: str, stage: int, case: str) -> None:
    wraps, ranks = WRAPS[what]

    def body() -> None:
        compare(run_of(case, stage, wraps, units=UNITS), case)

    zf.simulate(ranks)(body)()


def test_on_disk(tmp_path: Path) -> None:
    def body() -> None:
        for what in (("opt_state",), ("opt_state", "params")):
            away = zf.transforms.offload(to="disk", path=tmp_path / what[-1], what=what)
            compare(run_of("clipped", 3, [halves, away], units=UNITS), "clipped")

    zf.simulate(2)(body)()


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 2)])
def test_bfloat16(stage: int, ranks: int) -> None:
    """What rests does so bit for bit; the rest is what the judge makes of it, up to rounding."""

    def body() -> None:
        wraps = [zf.transforms.precision(), zf.transforms.donate()]
        compare(run_of("momentum", stage, wraps, units=UNITS), "momentum", near=0.05)

    zf.simulate(ranks)(body)()


def test_a_step_that_overflows_is_missed_by_nobody() -> None:
    def body() -> None:
        scaled = zf.transforms.precision(compute=F64, reduce=F64, loss_scale="dynamic")
        step, state = stepped("adamw", 3, [scaled])
        state = step.place(state)
        for i in range(3):
            bad = batch_of(i + 1)
            bad["x"] = bad["x"] * float("inf")
            before = step.unplace(state)
            state, metrics = step(state, zf.local_batch(bad))
            assert bool(metrics["overflow"])
            after = step.unplace(state)
            assert torch.equal(
                after.aux["skip_unused"]["missed"], before.aux["skip_unused"]["missed"]
            )
            state, _ = step(state, zf.local_batch(batch_of(i)))
        wanted, _ = judged("adamw")
        for name, x in found_in(step.unplace(state)).items():
            if name in wanted[2]:
                assert torch.allclose(x, wanted[2][name], atol=1e-10, rtol=0), name

    zf.simulate(2)(body)()


def test_checkpoints_go_on_with_the_counts(tmp_path: Path) -> None:
    """Saved at ZeRO 3 on two ranks, restored at ZeRO 1 on three; then from a full state."""

    def first() -> None:
        step, state = stepped("adamw", 3)
        state = step.place(state)
        for i in range(2):
            state, _ = step(state, zf.local_batch(batch_of(i)))
        zf.save(tmp_path, state)

    def second() -> Any:
        step, state = stepped("adamw", 1)
        state = zf.restore(tmp_path, like=step.place(state))
        for i in range(2, 4):
            state, _ = step(state, zf.local_batch(batch_of(i)))
        return step.unplace(state)

    zf.simulate(2)(first)()
    full = zf.simulate(3)(second)()[0]
    step, _ = stepped("adamw", None)
    for i in range(4, 6):
        full, _ = step(full, batch_of(i))
    wanted, used = judged("adamw")
    for name, x in found_in(full).items():
        if name in wanted[-1]:
            assert torch.allclose(x, wanted[-1][name], atol=1e-10, rtol=0), name
    missed = dict(
        zip(zf.tree.flatten_names(full.params), full.aux["skip_unused"]["missed"][0], strict=True)
    )
    for name in judged("adamw")[0][-1]:
        if " " not in name:
            assert int(missed[name]) == sum(name not in row for row in used), name


def test_a_run_without_it_can_go_on_with_it(tmp_path: Path) -> None:
    """Until then every leaf has taken part in all updates."""
    step, state = stepped("adamw", None, skip=False)
    for _ in range(2):
        state, _ = step(state, batch_of(3))
    zf.save(tmp_path, state)
    skipping, like = stepped("adamw", None)
    restored = zf.restore(tmp_path, like=skipping.place(like))
    assert int(restored.aux["skip_unused"]["missed"].sum()) == 0
    for start in (state, restored):
        now, _ = skipping(start, batch_of(3))
        assert int(now.aux["skip_unused"]["missed"].sum()) == 2  # `never`, and `still`
        assert int(now.opt_state.count) == 3


def test_all_leaves_in_use_give_the_same_bits() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return ((batch @ params["w"]).square() + params["b"]).mean()

    params = {"w": torch.randn(WIDTH, 3, dtype=F64), "b": torch.ones(3, dtype=F64)}

    def run(skip: bool) -> Any:
        tx = optim.adamw(0.1)
        step = zf.shard(zf.train_step(loss, tx, skip_unused=skip), stage=3)
        state = step.place(zf.TrainState.create(params, tx))
        for i in range(3):
            state, _ = step(state, zf.local_batch(batch_of(i)["x"]))
        full = step.unplace(state)
        return full.params, full.opt_state

    def both() -> Any:
        return run(True), run(False)

    for mine, its in zf.simulate(2)(both)():
        for a, b in zip(zf.tree.leaves(mine), zf.tree.leaves(its), strict=True):
            assert torch.equal(a, b)


def test_one_exchange_a_step_and_only_with_it() -> None:
    def body(skip: bool) -> dict[str, int]:
        step, state = stepped("adamw", 2, skip=skip)
        state = step.place(state)
        for _ in range(3):
            with zf.comm.ledger() as sent:
                state, _ = step(state, zf.local_batch(batch_of(3)))
        return dict(sent.calls_by_label)

    for mine, its in zip(*(zf.simulate(2)(body)(skip) for skip in (True, False)), strict=True):
        assert mine == {**its, "leaves in use": 1}


@pytest.mark.parametrize("stage", [1, 3])
def test_dropped_layers_rest(stage: int) -> None:
    def body() -> tuple[list[int], list[int]]:
        tx = optim.adamw(0.1, weight_decay=0.1)
        bare = zf.train_step(stack_loss, tx, skip_unused=True)
        step = zf.shard(zf.transforms.drop_layers(bare, theta=0.1, gamma=10.0), stage=stage)
        state = step.place(zf.TrainState.create(stack(F64), tx, key=3))
        rows = []
        for i in range(4):
            before = zf.tree.leaves(zf.full(state.params))
            state, _ = step(state, zf.local_batch(regression(i, F64)))
            after = zf.tree.leaves(zf.full(state.params))
            rows.append([torch.equal(a, b) for a, b in zip(before, after, strict=True)])
        missed = state.aux["skip_unused"]["missed"][0].tolist()
        return missed, [sum(column) for column in zip(*rows, strict=True)]

    for missed, unchanged in zf.simulate(2)(body)():
        assert missed == unchanged and {0, 2} <= set(missed)


def test_averaged_updates_of_what_rests_are_none() -> None:
    """An average in a chain keeps its own counts, too."""

    def body() -> None:
        f = zf.functionalize(MODULE, train=True)
        tx = optim.chain(optim.ema(0.9), optim.scale_by_schedule(-0.1))
        step = zf.shard(zf.train_step(loss_of(f), tx, skip_unused=True), stage=2)
        state = step.place(zf.TrainState.create(f.params, tx))
        for row in judged("adamw")[1][:4]:
            i = int(state.step)
            before = zf.tree.flatten_names(zf.full(state.params))
            state, _ = step(state, zf.local_batch(batch_of(i)))
            after = zf.tree.flatten_names(zf.full(state.params))
            assert {name for name in after if not torch.equal(after[name], before[name])} == row

    zf.simulate(2)(body)()


@pytest.mark.parametrize(
    ("tx", "what"),
    [
        (optim.lamb(0.1), "lamb"),
        (optim.skip_nonfinite(optim.sgd(0.1)), "skip_nonfinite"),
        (
            optim.GradientTransformation(
                lambda params: optim.EmptyState(), lambda grads, state, params: (grads, state)
            ),
            "of your own",
        ),
    ],
)
def test_what_is_refused(tx: Any, what: str) -> None:
    for made in (
        tx,
        optim.chain(optim.clip_by_global_norm(1.0), tx),
        optim.masked(tx, is_expert),
        optim.multi_transform({"a": optim.sgd(0.1), "b": tx}, lambda path: "a"),
    ):
        with pytest.raises(zf.CompositionError, match=what):
            zf.train_step(lambda p, b: p, made, skip_unused=True)


def test_compression_and_capture_are_refused() -> None:
    step, state = stepped("adamw", None)
    with pytest.raises(zf.CompositionError, match="compress_grads exclude"):
        zf.transforms.compress_grads(step)
    with pytest.raises(zf.CompositionError, match="asks on the host"):
        zf.captured(step)(state, batch_of(0))


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_step_that_does_not_know_of_counts_refuses_them(stage: int | None) -> None:
    """It would correct the bias of what has rested by the count of all steps."""
    tx = optim.adam(0.02)
    state = zf.TrainState.create(stack(F64), tx)
    knowing, plain = (
        zf.remat(zf.train_step(stack_loss, tx, skip_unused=on)) for on in (True, False)
    )
    if stage is not None:
        knowing, plain = (zf.shard(step, stage=stage) for step in (knowing, plain))
    placed = knowing.place(state)
    batch = regression(8, F64)
    for given in (placed, plain.place(knowing.unplace(placed))):
        with pytest.raises(zf.PlacementError, match="skip_unused"):
            plain(given, batch)
    plain(plain.place(state), batch)
