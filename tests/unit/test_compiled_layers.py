"""``functionalize(compile=...)``: eager numbers, one graph for all layers, compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_any_mode_without_ignore_compile_internals,
    is_in_torch_dispatch_mode,
)

import zfunc as zf
from tests.laws.covering import Covering
from tests.laws.pipeline_covering import pairwise_rows
from zfunc import optim
from zfunc.errors import CompositionError
from zfunc.transforms.capture import Reads

# dynamo asks every tensor that it meets for its `grad`, also where torch warns of that (2.13)
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
TX = optim.adamw(1e-2)
WIDTH = 8
Wrap = Callable[[Any], Any]


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.up(self.norm(x))).unflatten(-1, (2, -1))
        return x + self.drop(self.down(wide.flatten(-2)))


class Whole(nn.Module):
    """Three layers behind a product, so that each is given what has a gradient, and a head."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))  # no view, which would be compiled for
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@pytest.fixture(autouse=True)
def counters() -> Iterator[Any]:
    """What dynamo has counted in this test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def rows(length: int = 5) -> Tensor:
    return torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(
    compile: Any, wrap: Wrap, batches: list[Tensor], ranks: int = 1, dropout: float = 0.2
) -> Any:
    """Losses of steps, and the bytes that they sent."""
    net = zf.functionalize(Whole(dropout), compile=compile)
    step = wrap(zf.train_step(lambda p, x: net.apply(p, x).square().mean(), TX))

    def run() -> Any:
        state, losses = step.place(zf.TrainState.create(net.params, TX, key=3)), []
        with zf.comm.ledger() as led:
            for batch in batches:
                state, metrics = step(state, step.local_batch(batch))
                losses.append(metrics["loss"].item())
        return losses, led.by_label

    return run() if ranks == 1 else zf.simulate(ranks)(run)()[0]


WRAPS: dict[str, tuple[int, Wrap]] = {
    "stage 0": (2, lambda f: zf.shard(f, stage=0)),
    "stage 3, recomputed": (2, lambda f: zf.remat(zf.shard(f, stage=3))),
    "stage 3, 16 bits": (2, lambda f: zf.precision(zf.shard(zf.donate(f), stage=3))),
    "drop_layers": (1, lambda f: zf.drop_layers(f, theta=0.5, gamma=0.5)),
    "quantize": (
        1,
        lambda f: zf.quantize(f, start_bits=8, target_bits=4, period=1, group_size=8),
    ),
    "pipeline": (2, lambda f: zf.pipeline(f, microbatches=2, pipe=2)),
    "offload": (1, lambda f: zf.offload(f)),
    "accumulate, compress_grads": (
        2,
        lambda f: zf.accumulate(zf.compress_grads(zf.shard(f, stage=1)), 2),
    ),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_step_has_eager_numbers_and_bytes_and_one_graph(name: str, counters: Any) -> None:
    ranks, wrap = WRAPS[name]
    eager = trained(False, wrap, [rows()] * 2, ranks)
    assert trained({"backend": "aot_eager"}, wrap, [rows()] * 2, ranks) == eager
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize(("dynamic", "more"), [(True, 0), (None, 1)])
def test_another_length_is_compiled_once_or_never(
    dynamic: bool | None, more: int, counters: Any
) -> None:
    net = zf.functionalize(Whole(), compile={"backend": "eager", "dynamic": dynamic})
    step = zf.train_step(lambda p, x: net.apply(p, x).square().mean(), TX)
    state, graphs = zf.TrainState.create(net.params, TX, key=3), []
    for i in range(50):
        state, _ = step(state, rows(5 + i % 2))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] + [graphs[0] + more] * 49


def test_wrong_settings_are_named() -> None:
    with pytest.raises(TypeError, match=r"compile='max-autotune': expected True, or a dict"):
        zf.functionalize(Whole(), compile="max-autotune")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no layers; name some, functionalize\(units=...\)"):
        zf.functionalize(nn.Linear(2, 2), compile=True)
    assert "x 3, compiled," in repr(zf.functionalize(Whole(), compile=True))


def test_a_split_step_refuses_compiled_layers_before_it_plans() -> None:
    net = zf.functionalize(Whole(), compile={"backend": "eager"})
    step = zf.split(zf.train_step(lambda p, x: net.apply(p, x).mean(), TX), net, tensor=2)

    def run() -> None:
        with pytest.raises(CompositionError, match="Leave compile out"):
            step.place(zf.TrainState.create(net.params, TX))

    zf.simulate(2)(run)()


def test_layers_are_compiled_before_a_step_is_recorded(counters: Any) -> None:
    """The watcher of ``captured``'s eager steps lets dynamo at them: a capture could not."""
    net = zf.functionalize(Whole(), compile={"backend": "aot_eager"})
    step = zf.train_step(lambda p, x: net.apply(p, x).square().mean(), TX)
    state = zf.TrainState.create(net.params, TX, key=3)
    with Reads(torch.device("cpu")):
        state, _ = step(state, rows())
    assert counters["stats"]["unique_graphs"] == 1
    step(state, rows())
    assert counters["stats"]["unique_graphs"] == 1


def test_modes_of_simulated_ranks_are_over_behind_them() -> None:
    """torch has one flag for all threads; what it says is part of what compiled code asks."""

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def one_behind_the_other() -> None:
        for turn in range(2):
            if turn == zf.rank():
                mode = Watcher()
                mode.__enter__()
            zf.psum(torch.zeros(1))
        for turn in range(2):
            if turn == zf.rank():
                mode.__exit__(None, None, None)
            zf.psum(torch.zeros(1))

    zf.simulate(2)(one_behind_the_other)()
    assert not is_in_torch_dispatch_mode()
    assert not is_in_any_mode_without_ignore_compile_internals()


def test_what_looks_at_operations_sees_those_of_eager_layers(counters: Any) -> None:
    def seen(compile: Any) -> list[Any]:
        net = zf.functionalize(Whole(), compile=compile)
        step = zf.train_step(lambda p, x: net.apply(p, x).square().mean(), TX)
        given = zf.TrainState.create(net.params, TX, key=3), rows()
        return [zf.profile(step, *given).flops.total, zf.foresee(step, *given).flops.total]

    assert seen({"backend": "aot_eager"}) == seen(False)
    assert not counters["stats"]["unique_graphs"]


# --- Hugging Face --------------------------------------------------------------------------------

MODELS = {"LlamaForCausalLM": 1, "GPT2LMHeadModel": 1, "BertForMaskedLM": 1}
MODELS |= {"T5ForConditionalGeneration": 4}
whole = pytest.mark.skipif(not Covering.whole, reason="up to minutes for each case: --whole")
STAGE_3: Wrap = functools.partial(zf.shard, stage=3)


def hugging_face(name: str, dropout: float) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    sizes: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    if name.startswith("GPT2"):
        sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2}
        sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    elif name.startswith("T5"):
        sizes |= {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        sizes |= {"decoder_start_token_id": 0, "dropout_rate": dropout}
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2}
        if name.startswith("Bert"):
            sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    built: nn.Module = kind(kind.config_class(**sizes)).train()
    return built


def ids(length: int = 6) -> Tensor:
    return torch.randint(3, 32, (2, length), generator=torch.Generator().manual_seed(0))


def losses(
    model: nn.Module, compile: Any, wrap: Wrap, batches: Sequence[Tensor], fuse: bool = False
) -> list[float]:
    net = zf.functionalize(model, compile=compile, fuse=fuse)
    step = wrap(zf.train_step(lambda p, x: net.apply(p, x, labels=x).loss, TX))
    state, found = step.place(zf.TrainState.create(net.params, TX, key=3)), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"].item())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_layers(name: str, counters: Any) -> None:
    """With dropout. Compiled layers get no cache of keys, and eager ones have one."""

    def run(compile: Any) -> list[float]:
        return losses(hugging_face(name, 0.1), compile, STAGE_3, [ids()] * 2)

    eager, compiled = run(False), run({"backend": "aot_eager"})
    # Layers of T5's decoder share an input: a graph returns the sum of its own uses.
    last = pytest.approx(eager[1], rel=1e-6) if name.startswith("T5") else eager[1]
    assert compiled == [eager[0], last]
    assert counters["stats"]["unique_graphs"] == MODELS[name] and not counters["graph_break"]


@pytest.mark.parametrize(
    "name", [x if x.startswith("Llama") else pytest.param(x, marks=whole) for x in MODELS]
)
def test_kernels_in_compiled_layers(name: str, counters: Any) -> None:
    """``fuse=True`` beside it: positions are turned by the model's own function."""

    def run(compile: Any) -> list[float]:
        return losses(hugging_face(name, 0.0), compile, STAGE_3, [ids()] * 2, fuse=True)

    assert run({"backend": "aot_eager"}) == pytest.approx(run(False), rel=1e-6)
    assert counters["stats"]["unique_graphs"] == MODELS[name] and not counters["graph_break"]


@whole
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dynamic", "more"), [(True, 0), (None, 1)])
def test_lengths_of_hugging_face_models(
    dynamic: bool | None, more: int, name: str, counters: Any
) -> None:
    net = zf.functionalize(
        hugging_face(name, 0.1), compile={"backend": "eager", "dynamic": dynamic}
    )
    first = int(name.startswith("T5"))  # two lengths that are equal would be taken for one
    step = zf.train_step(lambda p, x: net.apply(p, x, labels=x[:, first:].contiguous()).loss, TX)
    state, graphs = zf.TrainState.create(net.params, TX, key=3), []
    for i in range(50):
        state, _ = step(state, ids(5 + i % 2))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] + [graphs[0] * (1 + more)] * 49


# --- inductor ------------------------------------------------------------------------------------

FLAGS = (False, True)


@whole
@pytest.mark.parametrize(
    ("stage", "recomputed", "short", "dropped", "dropout"),
    pairwise_rows([(0, 3), FLAGS, FLAGS, FLAGS, (0.0, 0.2)], lambda row: 1.0),
)
def test_inductor_beside_transforms(
    stage: int, recomputed: bool, short: bool, dropped: bool, dropout: float, counters: Any
) -> None:
    """Every two of stage, remat, precision, drop_layers and dropout."""

    def wrap(f: Any) -> Any:
        f = zf.shard(f, stage=stage)
        f = zf.remat(f) if recomputed else f
        f = zf.precision(f) if short else f
        return zf.drop_layers(f, theta=0.5, gamma=0.5) if dropped else f

    def run(compile: Any) -> list[float]:
        return trained(compile, wrap, [rows()] * 3, ranks=2, dropout=dropout)[0]

    with torch._inductor.config.patch(fallback_random=True, emulate_precision_casts=short):
        compiled = run(True)
    assert compiled == pytest.approx(run(False), rel=1e-2 if short else 1e-6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@whole
@pytest.mark.parametrize(
    ("name", "stage", "dropout"),
    pairwise_rows([tuple(MODELS), (0, 3), (0.0, 0.1)], lambda row: 1.0),
)
def test_inductor_of_hugging_face_layers(
    name: str, stage: int, dropout: float, counters: Any
) -> None:
    def run(compile: Any) -> list[float]:
        wrap = functools.partial(zf.shard, stage=stage)
        return losses(hugging_face(name, dropout), compile, wrap, [ids()] * 2)

    with torch._inductor.config.patch(fallback_random=True):
        compiled = run(True)
    assert compiled == pytest.approx(run(False), rel=1e-6)
    assert counters["stats"]["unique_graphs"] == MODELS[name] and not counters["graph_break"]
