"""``zf.profile``: what is counted, where it belongs, and that nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import zfunc as zf
from tests.laws.covering import Covering
from tests.laws.foreseen_steps import STEPS, batch
from tests.unit.test_foreseen_flops import LeNet
from zfunc import optim
from zfunc.foresight import peaks
from zfunc.foresight.costs import by_module, covered
from zfunc.foresight.peaks import published
from zfunc.foresight.watch import TimedRow
from zfunc.ranks import world


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    before = _there()
    yield
    assert _there() == before


def _there() -> tuple[int, ...]:
    every = (
        *(hooks._global_forward_hooks, hooks._global_forward_pre_hooks),
        *(hooks._global_forward_hooks_always_called, world.current().ledgers),
    )
    return len(_get_current_dispatch_mode_stack()), *map(len, every)


# FLOPs

FORESEEN = ("plain", "quantize", "all of them", "drop_layers")
CASES = tuple(STEPS) if Covering.whole else FORESEEN


@pytest.mark.parametrize("name", [name for name in CASES if not STEPS[name].axes])
def test_flops_are_those_foreseen(name: str) -> None:
    step, state, rows = STEPS[name].step(3, 1), STEPS[name].state(), batch(1)
    seen = zf.profile(step, state, rows, warmup=1)
    told = zf.foresee(step, state, rows, ranks=1, device="cpu")
    assert seen.flops.total == told.flops.total > 0
    ours, theirs = seen.flops.by_phase, told.flops.by_phase
    assert (ours["backward"], ours["recomputed"]) == (theirs["backward"], theirs["recomputed"])
    assert ours["forward"] + ours["update"] == theirs["forward"]
    layers = {name: cost for name, cost in seen.modules.items() if name.count(".") == 1}
    assert set(layers) == {f"blocks.{i}" for i in range(4)}
    for cost in layers.values():
        assert cost.parameters == 72 * 72 * 12 + 2 * 72


EVERY = [name for name in STEPS if 1 in STEPS[name].stages and name != "replicas"]
ON_RANKS = EVERY if Covering.whole else ["split, remat", "1f1b"]


@pytest.mark.parametrize("name", ON_RANKS)
def test_flops_by_layer_on_ranks_are_those_foreseen(name: str) -> None:
    """Of each rank its own, with the bytes that it sends."""
    case, stage = STEPS[name], 1
    rows = batch(2)

    def body() -> Any:
        step = case.step(stage, 2)
        mine = step.local_batch(rows)
        return zf.profile(step, case.state(), mine, warmup=1), mine

    for rank, (seen, mine) in enumerate(zf.simulate(2)(body)()):
        told = zf.foresee(case.step(stage, 2), case.state(), mine, ranks=2, rank=rank, device="cpu")
        assert seen.flops.by_layer == told.flops.by_layer
        assert (seen.sent.by_label, seen.sent.calls) == (told.sent.by_label, told.sent.calls)
        assert (seen.rank, seen.ranks, seen.state_bytes) == (rank, 2, told.state_bytes)


def forward_of(module: nn.Module, x: Tensor) -> Any:
    model = zf.functionalize(module)
    apply = zf.evaluate(model.apply)
    return zf.profile(lambda s, x: (s, apply(s["params"], x)), {"params": model.params}, x)


def test_lenet() -> None:
    seen = forward_of(LeNet(), torch.zeros(1024, 1, 28, 28))
    assert (seen.parameters, seen.macs) == (61_706, 426_516_480)
    assert seen.flops.total == seen.modules[""].forward == 853_032_960
    assert seen.modules["features.6"].forward == 2 * 1024 * 120 * 400
    assert seen.modules["features"].parameters + seen.modules["classes"].parameters == 61_706
    assert "853 MFLOPs" in str(seen)


def test_a_linear_layer() -> None:
    seen = forward_of(nn.Linear(10, 10), torch.zeros(1, 10))
    assert (seen.parameters, seen.flops.total, seen.macs) == (110, 200, 100)


SGD = optim.sgd(0.1)


def mlp_step(wrap: Any = lambda step: step, tx: Any = SGD) -> Any:
    """Layers that end in what a backward pass reads: nothing of them is left out."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return zf.scan(lambda p, x: torch.tanh(x @ p["w"]), params["layers"], x).square().mean()

    params = {"layers": zf.Layers({"w": torch.eye(32)} for _ in range(3))}
    return wrap(zf.train_step(loss, tx)), zf.TrainState.create(params, tx)


def test_what_is_recomputed_is_forward_once_more() -> None:
    step, state = mlp_step(zf.remat)
    seen = zf.profile(step, state, torch.ones(8, 32))
    for i in range(3):
        cost = seen.modules[f"layers.{i}"]
        assert cost.recomputed == cost.forward == 2 * 8 * 32 * 32
        assert cost.backward == cost.forward * (2 if i else 1)  # nobody asks for the batch's
    plain = zf.profile(*mlp_step(), torch.ones(8, 32))
    assert plain.flops.total + 3 * 2 * 8 * 32 * 32 == seen.flops.total


def test_products_of_an_update_are_no_forward() -> None:
    cost = zf.profile(*mlp_step(tx=optim.muon(0.1)), torch.ones(8, 32)).modules[""]
    assert cost.forward == 3 * 2 * 8 * 32 * 32
    assert cost.update > 0 and cost.update_seconds > 0


# Bytes, time


def test_kept_bytes_are_what_backward_needs() -> None:
    """Of each layer its result, which the next one saves, and of tanh, which is the same."""
    step, state = mlp_step()
    seen = zf.profile(step, state, torch.ones(8, 32))
    assert [seen.modules[f"layers.{i}"].kept_bytes for i in range(3)] == [8 * 32 * 4] * 3
    wide = lambda p, x: torch.tanh(torch.tanh(x @ p["w"]) + 1)  # noqa: E731
    loss = lambda p, x: zf.scan(wide, p["layers"], x).sum()  # noqa: E731
    for wrap, each in ((lambda f: f, 2), (zf.remat, 1)):
        kept = zf.profile(wrap(zf.train_step(loss, optim.sgd(0.1))), state, torch.ones(8, 32))
        assert kept.modules["layers.1"].kept_bytes == each * 8 * 32 * 4


def test_moved_bytes_and_time_add_up() -> None:
    seen = zf.profile(*mlp_step(), torch.ones(8, 32))
    whole, products = seen.modules[""], seen.operators["mm"]
    assert products.calls == 9 - 1  # nobody asks for the gradient of the batch
    assert products.bytes_moved == 4 * (8 * (8 * 32 + 8 * 32) + 8 * 32 * 32)
    assert whole.seconds == pytest.approx(sum(c.seconds for c in seen.operators.values()))
    assert whole.seconds == pytest.approx(seen.within * seen.seconds)
    assert whole.seconds + whole.between_seconds == pytest.approx(seen.attributed * seen.seconds)
    assert 0 < seen.within < seen.attributed < 1 and seen.unwatched_seconds > 0
    assert all(0 <= row.begin <= seen.seconds for row in seen.rows)


def test_time_between_operators_is_that_of_the_module_which_both_are_in() -> None:
    def row(layer: str, begin: float, phase: str = "forward", seconds: float = 1.0) -> TimedRow:
        return TimedRow("compute", "mm", layer, phase, begin=begin, seconds=seconds)

    rows = [
        row("blocks.0.up", 0.0, seconds=9.0),
        row("blocks.0", 2.0),  # inside the first, as on another stream
        row("blocks.0.down", 10.0),  # 1 s behind the first
        row("blocks.1", 13.0),  # 2 s
        row("head", 17.0),  # 3 s, in no module
        row("head", 22.0, "backward"),  # 4 s, in no phase
        row("", 28.0, "update"),  # 5 s
        row("", 35.0, "update"),  # 6 s
    ]
    found = by_module(rows, {}, {})
    between = {name: cost.between_seconds for name, cost in found.items() if cost.between_seconds}
    assert between == {"": 9.0, "blocks": 3.0, "blocks.0": 1.0}
    assert covered(rows) == 36.0 - 1 - 2 - 3 - 4 - 5 - 6


def test_rows_know_a_causal_mask() -> None:
    """Backward, too, as those foreseen do: half of that attention is left out."""
    q = torch.zeros(1, 2, 64, 16)

    def step(state: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            masked = F.scaled_dot_product_attention(x + p["b"], x, x, is_causal=True)
            return (masked + F.scaled_dot_product_attention(x + p["b"], x, x)).sum()

        return state, zf.value_and_grad(loss)(state["params"])[0]

    state = {"params": {"b": torch.zeros(16)}}
    seen = zf.profile(step, state, q), zf.foresee(step, state, q, ranks=1, device="cpu")
    for rows in (each.rows for each in seen):
        causal = [row.causal for row in rows if "attention" in row.name]
        assert causal == [True, False, False, True]
        assert sum(row.causal for row in rows) == 2


def test_the_peak_of_a_gpu_is_the_published_one() -> None:
    assert published("AMD Instinct MI300X", torch.float16).flops_per_second == 1307.4e12
    assert published("NVIDIA A100-SXM4-80GB", torch.float32).flops_per_second == 19.5e12
    assert published("Tesla V100-SXM2-32GB", torch.bfloat16).flops_per_second is None
    assert published("NVIDIA A100-SXM4-80GB", torch.float64).flops_per_second == 19.5e12
    assert "unknown for bfloat16" in published("Tesla V100-SXM2-32GB", torch.bfloat16).source


@pytest.mark.parametrize(
    "name",
    ["a GPU of next year", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)
def test_the_peak_of_another_gpu_or_of_a_slice_is_unknown(name: str) -> None:
    assert published(name, torch.float16).flops_per_second is None


def test_the_peak_of_a_cpu_is_that_of_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(peaks, "_measured", lambda dtype, threads: asked.append(threads) or 1.0)
    assert peaks.peak_of(torch.device("cpu"), torch.float32).flops_per_second == 2 * 512**3
    assert asked == [torch.get_num_threads()]


# Modules


def test_modules_inside_of_layers_have_their_names() -> None:
    """Of an unmodified model; in the second run of a layer, too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config)
    ids, tx = torch.zeros(2, 9, dtype=torch.int64), optim.adamw(1e-3)
    model = zf.functionalize(module)

    def loss(params: Any, ids: Tensor) -> Tensor:
        return model.apply(params, input_ids=ids, labels=ids, use_cache=False).loss

    step = zf.remat(zf.donate(zf.shard(zf.train_step(loss, tx), stage=3, unit_bytes=1 << 10)))
    seen = zf.profile(step, zf.TrainState.create(model.params, tx), ids, depth=5)
    name = "model.layers.1.mlp.gate_proj"
    cost = seen.modules[name]
    assert cost.parameters == dict(module.named_modules())[name].weight.numel()
    assert cost.forward == cost.recomputed == 2 * 18 * 32 * 48
    assert cost.backward == 2 * cost.forward
    assert cost.backward_seconds > 0 and "gate_proj" in str(seen)
    assert seen.modules["lm_head"].forward == 2 * 18 * 32 * 64
    assert sum(p.numel() for p in module.parameters()) == seen.parameters


def test_modules_of_a_step_that_knows_no_layers() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))

    def step(state: Any, x: Tensor) -> Any:
        call = lambda p: torch.func.functional_call(module, p, x).sum()  # noqa: E731
        loss, grads = zf.value_and_grad(call)(state["params"])
        return {"params": grads}, loss

    seen = zf.profile(step, {"params": dict(module.named_parameters())}, torch.ones(3, 4))
    assert seen.modules["1.1"].forward == 2 * 3 * 8 * 2
    assert seen.modules["1.1"].backward == 2 * 2 * 3 * 8 * 2
    assert seen.modules["0"].backward == 2 * 3 * 4 * 8
    assert seen.modules["1"].parameters == 18


# The state


def test_a_donated_state_stays_the_callers() -> None:
    step, state = mlp_step(lambda f: zf.donate(zf.shard(f, stage=3)))
    placed, x = step.place(state), torch.ones(8, 32)
    before = [leaf.clone() for leaf in zf.tree.leaves(placed)]
    for given in (state, placed):
        zf.profile(step, given, x)
    assert all(map(torch.equal, zf.tree.leaves(placed), before))
    assert torch.equal(state.params["layers"][0]["w"], torch.eye(32))
    step(placed, x)


def test_a_step_that_returns_its_state_alone() -> None:
    """The next step gets it, and not one that has been donated."""

    def step(state: Any, x: Tensor) -> Any:
        _, grads = zf.value_and_grad(lambda p: (x @ p["w"]).sum())(state["params"])
        return {"params": grads}

    seen = zf.profile(zf.donate(step), {"params": {"w": torch.eye(32)}}, torch.ones(8, 32))
    assert seen.flops.total == 2 * 2 * 8 * 32 * 32


def test_full_parameters_stay_with_the_module_that_holds_them() -> None:
    model, tx = zf.functionalize(nn.Sequential(nn.Linear(4, 4))), optim.sgd(0.1)
    step = zf.shard(zf.train_step(lambda p, x: model.apply(p, x).sum(), tx), stage=3)
    zf.profile(step, zf.TrainState.create(model.params, tx), torch.ones(2, 4))
    assert zf.tree.leaves(model.params)[1].shape == (4, 4)


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    before = torch.get_rng_state()
    zf.profile(lambda s, x: (s, F.dropout(x)), {"params": {}}, torch.ones(9))
    assert torch.equal(torch.get_rng_state(), before)


def test_offloaded_state_is_profiled() -> None:
    step, state = mlp_step(lambda f: zf.offload(zf.donate(f), to="cpu"))
    assert zf.profile(step, state, torch.ones(8, 32)).flops.total == 8 * 2 * 8 * 32 * 32


@pytest.mark.parametrize("at", ["loss", "backward", "again", "update"])
def test_a_step_that_fails_leaves_nothing_behind(at: str) -> None:
    """See the fixture."""
    calls = 0

    def fails(where: str) -> None:
        nonlocal calls
        if where == at:
            calls += 1
            if calls == 3 * {"again": 2, "update": 1}.get(at, 1):  # in the step that is watched
                raise RuntimeError("on purpose")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            fails("backward")
            return grad

    module = nn.Sequential(nn.Linear(4, 4))
    module.register_forward_hook(lambda *_: fails("loss"))
    tx = optim.sgd(0.1)

    def layer(p: Any, x: Tensor) -> Tensor:
        fails("again")
        return Failing.apply(torch.func.functional_call(module, p, x))

    def step(state: Any, x: Tensor) -> Any:
        call = lambda p: zf.layer(layer, p, x).square().sum()  # noqa: E731
        loss, grads = zf.value_and_grad(call)(state.params)
        fails("update")
        return state.replace(params=grads), loss

    state = zf.TrainState.create(dict(module.named_parameters()), tx)
    wrapped = zf.donate(zf.remat(step))
    with pytest.raises(RuntimeError, match="on purpose"):
        zf.profile(wrapped, state, torch.ones(2, 4))
    assert zf.tree.leaves(state.params)[0].isfinite().all()


# What it is shown as


def test_as_json_a_trace_and_html(tmp_path: Any) -> None:
    seen = zf.profile(*mlp_step(), torch.ones(8, 32))
    seen.json(tmp_path / "profile.json")
    told = json.loads((tmp_path / "profile.json").read_text())
    assert told["modules"]["layers.0"]["forward"] == seen.modules["layers.0"].forward
    assert told["operators"]["mm"]["calls"] == 8
    trace = json.loads(seen.chrome(tmp_path / "trace.json"))["traceEvents"]
    assert len(trace) == len(seen.rows) == len({event["ts"] for event in trace})
    assert {event["cat"] for event in trace} == {"forward", "backward", "update"}
    assert "<pre" in seen._repr_html_() and "layers" in seen._repr_html_()
    lines = str(zf.profile(*mlp_step(), torch.ones(8, 32), depth=1)).splitlines()
    assert any(line.startswith("  layers") for line in lines)
    assert not any(line.startswith("    0") for line in lines)


def test_what_cannot_be_profiled() -> None:
    step, state = mlp_step(zf.donate)
    with pytest.raises(ValueError, match="warmup=0"):
        zf.profile(step, state, torch.ones(8, 32), warmup=0)
    with pytest.raises(ValueError, match="depth=-1"):
        zf.profile(step, state, torch.ones(8, 32), depth=-1)
    with pytest.raises(zf.CompositionError, match=r"replayed.*Profile its \.step"):
        zf.profile(zf.captured(step), state, torch.ones(8, 32))
