"""A recorded initialiser gives the plain call's bits, and never holds what it need not."""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import warm
from tests.laws import architectures
from tests.unit.replay_models import GPT, check, leaves, parameters, replayed
from zfunc.errors import PlacementError
from zfunc.initialisation.recorder import record

ROOT = Path(__file__).parents[2]


def every_initialiser() -> dict[str, Tensor]:
    shape, init = (24, 16), nn.init
    drawn = {
        name: getattr(init, name)(torch.empty(*shape))
        for name in ("normal_", "uniform_", "xavier_normal_", "kaiming_uniform_", "orthogonal_")
    }
    drawn["truncated"] = init.trunc_normal_(torch.empty(*shape), std=0.7)
    drawn["tail"] = init.trunc_normal_(torch.empty(*shape), a=1.5, b=3.0)
    drawn["sparse"] = init.sparse_(torch.empty(*shape), 0.3)
    drawn["eye"] = init.eye_(torch.empty(*shape))
    drawn["dirac"] = init.dirac_(torch.empty(8, 8, 3))
    return drawn


def every_layer() -> dict[str, Tensor]:
    layers = nn.ModuleList(
        [
            *(nn.Linear(5, 7), nn.Conv2d(3, 8, 3), nn.LSTM(5, 6, 2), nn.GRU(4, 4)),
            *(nn.Embedding(9, 4, padding_idx=2), nn.MultiheadAttention(8, 2), nn.BatchNorm2d(4)),
            nn.TransformerEncoderLayer(8, 2, 16),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        ]
    )
    return {**layers.state_dict(), **dict(layers.named_parameters())}


def seeds() -> list[Any]:
    torch.manual_seed(3)
    first = torch.rand(5)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inside = torch.randn(20)
    after = torch.rand(3)
    torch.manual_seed(3)
    again = torch.rand(2)
    state = torch.get_rng_state()
    ahead = torch.randn(7)
    torch.set_rng_state(state)
    return [first, inside, after, again, ahead, torch.rand(30), torch.initial_seed()]


def generators() -> list[Any]:
    g = torch.Generator().manual_seed(1)
    h = torch.Generator()
    drawn = [torch.rand(3, generator=g), torch.rand(2), torch.randn(40, generator=g)]
    h.set_state(g.get_state())
    drawn += [torch.rand(4, generator=h), torch.rand(4, generator=g)]
    g.manual_seed(1)
    key = torch.tensor(17) * 3 + 1
    k = torch.Generator().manual_seed(int(key.item()))
    return [*drawn, torch.randperm(9, generator=g), torch.bernoulli(drawn[0], generator=k)]


def views_and_aliases() -> dict[str, Tensor]:
    flat = torch.zeros(60)
    a, b = flat[:24].view(4, 6), flat[24:48].view(6, 4)
    nn.init.normal_(a)
    b.copy_(a.t()).mul_(2)
    flat[50:].uniform_()
    a[1].fill_(7)
    a.t()[2] += b[2]
    square = torch.ones(3, 3)
    square.t_()[0, 1] = 5
    z = torch.randn(4, dtype=torch.complex64)
    return {"flat": flat, "a": a, "b": b, "square": square, "conj": z.conj(), "imag": z.imag}


def data_swaps() -> list[Tensor]:
    p = nn.Parameter(torch.randn(3, 4))
    kept = p.data
    p.data = torch.rand(2)
    p.data.add_(1)
    q = nn.Parameter(torch.empty(0))
    q.data = torch.from_numpy(np.arange(3.0, dtype=np.float32))
    grown = torch.empty(0).resize_(4).fill_(2)
    return [p, kept, q, grown, torch.rand(3, out=torch.empty(3)), copy.deepcopy(p)]


def dtypes() -> list[Any]:
    torch.set_default_dtype(torch.float64)
    try:
        a = torch.rand(3) + torch.arange(3)
        return [
            a,
            torch.arange(4) / 3,
            torch.ones(2, dtype=torch.int64) * 0.5,
            a.to(torch.bfloat16),
        ]
    finally:
        torch.set_default_dtype(torch.float32)


def values() -> list[Any]:
    rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
    x = torch.arange(12.0).reshape(3, 4)
    picked = x[x > 4]
    table = np.asarray(x).sum(0).tolist()
    if (x > 3).any() and not torch.equal(x, x + 1):
        x += picked.numel()
    where = torch.nonzero(x > 5)
    return [rates, x, picked, table, where, x.tolist(), torch.rand(4) * rates[2], "name", None, 3]


def values_drawn() -> list[Any]:
    n = int(torch.randint(3, 9, ()).item())
    x = torch.randn(n)
    while x.min() < -0.5:
        x = torch.where(x < -0.5, torch.randn(n), x)
    return [x, torch.randn(2), n]


def casts() -> list[Any]:
    a, b = nn.Linear(4, 3), nn.Linear(4, 3)
    b.weight = a.weight
    both = nn.ModuleList([a, b]).to(torch.bfloat16)
    assert a.weight is b.weight
    return [
        dict(both.named_parameters()),
        parameters(nn.Linear(2, 2).half()),
        nn.Linear(2, 2).weight,
    ]


def lists_of_tensors() -> list[Any]:
    xs = [torch.randn(3), torch.randn(2)]
    ms = torch._foreach_mul(xs, 2.0)
    torch._foreach_add_(xs, 1.0)
    return [*xs, *ms, *torch.randn(6).split(2), torch.stack(xs[:1])]


def never_written() -> list[Any]:
    return [
        torch.zeros(3),
        torch.empty(2, 0),
        torch.full((2,), 3),
        torch.tensor([1.0, 2.0]).add_(1),
    ]


MAKERS = [
    *(every_initialiser, every_layer, seeds, generators, views_and_aliases, data_swaps, dtypes),
    *(values, values_drawn, casts, lists_of_tensors, never_written),
]


@pytest.mark.parametrize("make_state", MAKERS, ids=lambda f: f.__name__)
def test_bits(make_state: Callable[[], Any]) -> None:
    check(make_state)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
def test_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    model, config = {
        "Llama": ("LlamaForCausalLM", architectures.GROUPED),
        "GPT2": ("GPT2LMHeadModel", architectures.GPT),
        "Bert": ("BertForMaskedLM", architectures.TEXT),
        "T5": ("T5ForConditionalGeneration", architectures.T5),
    }[name]

    def make_state() -> dict[str, Any]:
        module = architectures.built(model, **config)
        return {"params": parameters(module), "buffers": dict(module.named_buffers())}

    check(make_state)


def test_a_module_may_be_copied_to_meta_on_the_way() -> None:
    kept = []

    def make_state() -> dict[str, Tensor]:
        module = GPT(8, 1)
        kept.append(copy.deepcopy(module).to("meta"))
        return dict(module.named_parameters(remove_duplicate=False))

    recording = check(make_state)
    copy.deepcopy(kept[-1])  # such a template outlives the recording
    assert recording.tree["head.weight"] is recording.tree["embed.weight"]
    assert isinstance(recording.tree["head.weight"], nn.Parameter)


def test_another_seed_gives_that_seeds_leaves() -> None:
    recording = record(lambda: parameters(GPT(8, 2)))
    torch.manual_seed(99)
    expected = leaves(parameters(GPT(8, 2)))
    torch.manual_seed(99)
    taken = replayed(recording)
    assert all(torch.equal(taken[i], leaf) for i, leaf in enumerate(expected))


def test_values_drawn_hold_for_one_state_of_the_generator() -> None:
    recording = record(values_drawn)
    torch.rand(1)
    with pytest.raises(PlacementError, match="set_rng_state"):
        replayed(recording)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, ...]]:
    step = st.tuples(st.integers(0, 15), *(st.integers(0, 9) for _ in range(3)))
    return draw(st.lists(step, min_size=1, max_size=40))


def run_program(program: list[tuple[int, ...]]) -> list[Tensor]:
    """Random operations on random views of a growing pool; few of its tensors are returned."""
    pool = [torch.zeros(2, 3), torch.randn(2, 3)]
    g = torch.Generator().manual_seed(5)
    for kind, i, j, n in program:
        x, y = pool[i % len(pool)], pool[j % len(pool)]
        match kind:
            case 0:
                x.normal_()
            case 1:
                x.zero_()
            case 2:
                x.copy_(y.clone())
            case 3:
                x[n % 2].uniform_(generator=g if n > 4 else None)
            case 4:
                x.t()[n % 3].fill_(n)
            case 5:
                pool.append(x + y)
            case 6:
                pool.append(x.flip(0) if n > 6 else x.t()[:, [1, 0]].t() if n > 4 else x[:, :])
            case 7:
                pool.append(torch.rand_like(y))
            case 8:
                pool.append(y.clone().mul_(n))
            case 9:
                x.add_(y)
            case 10:
                torch.manual_seed(n)
            case 11:
                g.manual_seed(n)
            case 12:
                pool.append(torch.zeros_like(x))
            case 13:
                x.mul_(float(y[0, 0] > 0))
            case 14:
                g.set_state(torch.get_rng_state())
            case 15:
                pool.append(torch.empty(9)[3:].view(2, 3).fill_(n))
    return pool[::3] + pool[-1:]


@settings(max_examples=150, deadline=None)
@given(programs())
def test_any_program(program: list[tuple[int, ...]]) -> None:
    check(run_program, program)


def test_the_tape_is_imported_by_the_first_init() -> None:
    code = """
        import sys, torch, zfunc as zf
        everything = [getattr(zf, name) for name in zf.__all__]
        tx = zf.optim.adamw(1e-3)
        step = zf.shard(zf.train_step(lambda p, x: (p["w"] * x).sum(), tx), stage=3)
        make = lambda: zf.TrainState.create({"w": torch.ones(3)}, tx)
        step(step.place(make()), torch.ones(3))
        print(sorted(name for name in sys.modules if name.startswith("zfunc.initialisation")))
        step.init(make)
        print("zfunc.initialisation.recorder" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = warm.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\nTrue\n"
