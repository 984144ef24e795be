"""``split(model, sequence=True)``: layers of modules on positions of the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import zfunc as zf
from tests.laws import plans_by_hand as by_hand
from tests.laws.architectures import LENGTH
from tests.laws.cases import assert_near, assert_same
from tests.laws.covering import Covering, each
from tests.laws.planned import FAMILIES, OTHERS, check, model_of
from tests.laws.plans_by_hand import gpt2, llama, spread, tokens, widened
from tests.laws.split_steps import TX, ranks_of
from zfunc.probing.plans import plan_of
from zfunc.probing.texts import text_of

transformers = pytest.importorskip("transformers")

ROWS = 6
Batch = dict[str, Tensor]


def of_family(name: str) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        kind, settings, _ = FAMILIES[name]
        return widened(spread(by_hand.built(kind, **settings)))

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(4, 2),
    "llama, tied": lambda: llama(4, 4, tie_word_embeddings=True, pad_token_id=1),
    "gpt2": gpt2,
    "qwen3": by_hand.qwen3,
    "gemma2": of_family("gemma2"),
    "bert": of_family("bert"),
    "mixtral": by_hand.mixtral,
    "t5": of_family("t5"),
}


@cache
def module_of(name: str) -> tuple[Any, Any]:
    module = MODELS[name]()
    return module, zf.functionalize(module, train=False)


# --- whole models, unmodified --------------------------------------------------------------------

FEW = [
    ("llama, 1 kv head", 4),
    ("gemma3", 3),
    ("bloom", 2),  # a submodule takes its input whole, and what it is added to cut
    ("falcon", 3),
    ("olmo2", 2),  # a norm over all heads is told of others
    ("gpt-oss", 2),
    ("deepseek", 2),
    ("opt", 3),
    ("deberta", 2),
    ("whisper", 2),
    ("mamba", 2),
]
ALL = [(name, ways) for name in (*FAMILIES, *OTHERS) for ways in (2, 3, 4)]
WHOLE = ("albert", "swin", "xlnet", "convnext")


@pytest.mark.parametrize(("name", "ways"), ALL if Covering.whole else FEW)
def test_what_ranks_make_of_their_positions_is_right(name: str, ways: int) -> None:
    model, batch = model_of(name)
    plan = plan_of(model, ways, example=batch, sequence=True)
    assert bool(plan.uncut) == (name in WHOLE), text_of(plan)
    assert bool(plan.streams) == (name not in WHOLE)
    check(model, plan, batch)


@pytest.mark.parametrize(("at", "side"), each([0, 1, 2], ["encoder", "decoder"]))
def test_layers_on_whole_streams_beside_others(side: str, at: int) -> None:
    """T5 hands on what is for each head; here one layer gives it to others of another sort."""
    model, batch = model_of("t5")
    plan = plan_of(model, 2, example=batch, sequence=True)
    name = f"{side}.block.{at}"
    assert name in plan.streams
    streams = {layer: its for layer, its in plan.streams.items() if layer != name}
    check(model, replace(plan, streams=streams), batch)


def test_what_is_called_with_other_tensors_outside_of_layers() -> None:
    model, batch = model_of("gpt2")
    plan = plan_of(model, 3, example=batch, sequence=True)
    assert plan.pointwise == ("transformer.drop", "transformer.ln_f")
    check(model, replace(plan, pointwise=()), batch)


# --- steps ---------------------------------------------------------------------------------------


def batch(i: int) -> Batch:
    """Texts of other lengths in each step, padded on the right; the second of two positions."""
    length = (LENGTH, 2, LENGTH - 1)[i % 3]
    ids, mask = tokens(i, ROWS)[:, :length], torch.ones(ROWS, length, dtype=torch.int64)
    mask[0, length - 1 :] = 0
    mask[3, max(1, length - 3) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_with(model: Any) -> Callable[[Any, Batch], Tensor]:
    def loss(params: Any, batch: Batch) -> Tensor:
        more = {}
        if "decoder_input_ids" in model.signature.parameters:
            more["decoder_input_ids"] = batch["input_ids"].flip(1).repeat(1, 2)  # longer ones
        logits = model.apply(params, **batch, **more).logits
        return F.cross_entropy(logits.flatten(0, 1), (logits.detach().argmin(-1)).flatten())

    return loss


def trained(
    model: Any, start: Any, wrap: Callable[[Any], Any], loss: Any = None, tx: Any = TX
) -> tuple[list[Any], Any]:
    step = wrap(zf.train_step(loss or loss_with(model), tx))
    state, metrics = step.place(zf.TrainState.create(start, tx, key=7)), []
    for i in range(3):
        state, out = step(state, step.local_batch(batch(i)))
        metrics.append(out)
    return metrics, step.unplace(state)


def on_positions(
    model: Any, ways: int, data: int = 1, stage: int | None = 3, **more: Any
) -> Callable[[Any], Any]:
    def wrap(step: Any) -> Any:
        mesh = zf.mesh(data=data, tensor=ways)
        step = zf.split(step, model, mesh=mesh, **{"sequence": True, **more})
        return step if stage is None else zf.shard(step, stage=stage)

    return wrap


@cache
def alone(name: str) -> Any:
    module, model = module_of(name)
    start = zf.functionalize(module).params
    return trained(model, start, lambda step: zf.shard(step, stage=0))


PLACES = [(2, 1, None), (3, 1, 0), (2, 2, 3), (4, 1, 1)]
TRAINED = [
    (name, *PLACES[(at + turn) % len(PLACES)])
    for turn, name in enumerate(MODELS)
    for at in range(len(PLACES) if Covering.whole else 1)
]


@pytest.mark.parametrize(("name", "ways", "data", "stage"), TRAINED)
def test_it_trains_as_in_one_process(name: str, ways: int, data: int, stage: int | None) -> None:
    """Among the lengths is one of fewer positions than ranks."""
    module, model = module_of(name)
    want, start = alone(name), zf.functionalize(module).params
    wrap = on_positions(model, ways, data, stage)
    for mine in ranks_of(ways, data, lambda: trained(model, start, wrap)):
        assert_near(mine, want, 1e-9)


BESIDE: dict[str, Callable[[Any], Any]] = {
    "remat": zf.remat,
    "remat, every second": lambda f: zf.remat(f, 2),
    "accumulate": lambda f: zf.accumulate(f, 3),
    "both": lambda f: zf.remat(zf.accumulate(f, 3)),
    "donate": zf.donate,
    "offload": lambda f: zf.offload(f, to="cpu"),
}


@pytest.mark.parametrize(("stage", "name"), each([0, 3], BESIDE))
def test_beside_another_transform(name: str, stage: int) -> None:
    module, model = module_of("gpt2" if stage else "llama")
    want, start = alone("gpt2" if stage else "llama"), zf.functionalize(module).params
    wrap = on_positions(model, 3, 1, stage)
    for mine in ranks_of(3, 1, lambda: trained(model, start, lambda f: BESIDE[name](wrap(f)))):
        assert_near(mine, want, 1e-9)


def test_layers_that_are_left_out() -> None:
    module, model = module_of("llama")
    start = zf.functionalize(module).params

    def drop(step: Any) -> Any:
        return zf.drop_layers(step, theta=0.3, gamma=1.0)

    want = trained(model, start, lambda f: drop(zf.shard(f, stage=0)))
    wrap = on_positions(model, 2)
    for mine in ranks_of(2, 1, lambda: trained(model, start, lambda f: drop(wrap(f)))):
        assert_near(mine, want, 1e-9)


ROUNDING: dict[str, Callable[[Any], Any]] = {
    "precision": zf.precision,
    "int8": lambda f: zf.compress_grads(f, "int8", freeze_step=1),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_what_rounds_leaves_no_leaf_to_drift(name: str) -> None:
    """``ranks_of`` compares bits; against the whole stream it is near."""
    module = module_of("llama")[0]
    dtype = torch.float32 if name == "precision" else torch.float64
    model = zf.functionalize(module, train=False)
    start = zf.tree.map(lambda x: x.to(dtype), model.params)

    def body(sequence: bool) -> Any:
        wrap = on_positions(model, 2, 2, sequence=sequence)
        return trained(model, start, lambda f: ROUNDING[name](wrap(f)))

    found = ranks_of(2, 2, lambda: body(True))
    whole = zf.simulate(4)(lambda: body(False))()
    assert_near(found[0][1].params, whole[0][1].params, 0.2)


def test_frozen_leaves_and_hidden_states() -> None:
    """A loss that looks at the stream between layers, of which some have no gradients."""
    module = llama(4, 2)
    for name, p in module.named_parameters():
        p.requires_grad_("layers.0" not in name or "norm" not in name)
    model = zf.functionalize(module, train=False)
    start = model.params

    def loss(params: Any, batch: Batch) -> Tensor:
        out = model.apply(params, **batch, output_hidden_states=True)
        assert all(type(x) is Tensor for x in out.hidden_states)
        return out.logits.square().mean() + sum(x.square().mean() for x in out.hidden_states)

    want = trained(model, start, lambda step: zf.shard(step, stage=0), loss)
    wrap = on_positions(model, 2, 2)
    for mine in ranks_of(2, 2, lambda: trained(model, start, wrap, loss)):
        assert_near(mine, want, 1e-9)


def test_texts_that_are_generated_and_evaluated_from_its_state() -> None:
    module, model = module_of("llama, tied")
    ids, start = tokens()[:, :4], zf.functionalize(module).params
    want = zf.generate(model, start, ids, max_new_tokens=6)
    loss = float(loss_with(model)(start, batch(0)))

    def rank() -> Any:
        step = on_positions(model, 2)(zf.train_step(loss_with(model), TX))
        state = step.place(zf.TrainState.create(start, TX))
        with torch.no_grad():
            found = float(loss_with(model)(state.params, batch(0)))
        return zf.generate(model, state.params, ids, max_new_tokens=6), found

    for texts, found in zf.simulate(2)(rank)():
        assert torch.equal(texts, want) and abs(found - loss) < 1e-9


# --- what is sent, and what is kept --------------------------------------------------------------

WAYS = 2


def kept(body: Callable[[], Any]) -> tuple[Any, int]:
    """What a function gives, and the bytes that it keeps for backward."""
    found: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = body()
    return out, sum(x.untyped_storage().nbytes() for x in found.values())


def measured(
    name: str, sequence: bool, beside: Callable[[Any], Any] = lambda f: f
) -> list[tuple[Any, int]]:
    """Of each rank what a step sends, and what its loss keeps."""
    module, model = module_of(name)
    start = zf.functionalize(module).params

    def rank() -> tuple[Any, int]:
        counts = []

        def loss(params: Any, ids: Tensor) -> Tensor:
            def run() -> Tensor:
                return by_hand.loss_of(model.apply(params, input_ids=ids).logits, ids)

            out, count = kept(run)
            counts.append(count)
            return out

        split = on_positions(model, WAYS, 1, None, sequence=sequence)
        step = beside(split(zf.train_step(loss, TX)))
        state = step.place(zf.TrainState.create(start, TX))
        with zf.comm.ledger() as led:
            step(state, tokens(0, ROWS))
        return dict(led.by_label), counts[0]

    return zf.simulate(WAYS)(rank)()


STREAMS = ("tensor forward", "tensor backward", "tensor embed", "tensor head")


def sent(found: Sequence[tuple[Any, int]]) -> int:
    """Bytes of streams that all ranks send."""
    return sum(led.get(label, 0) for led, _ in found for label in STREAMS)


def stream_bytes(name: str) -> int:
    config = module_of(name)[1].config
    return ROWS * LENGTH * config.hidden_size * 8


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "bert", "mixtral"])
def test_as_many_bytes_are_sent(name: str) -> None:
    """Beside them gradients of whole leaves are summed, and those of rows that are positions."""
    whole, parts = measured(name, False), measured(name, True)
    config = module_of(name)[1].config
    chosen = getattr(config, "num_experts_per_tok", 0) if name == "mixtral" else 0
    weights = config.num_hidden_layers * ROWS * LENGTH * chosen * 8
    assert sent(parts) == sent(whole) - WAYS * weights  # whose gradients are summed as positions
    assert "tensor whole leaves" not in whole[0][0]
    model = module_of(name)[1]
    plan = plan_of(model, WAYS, sequence=True)
    leaves = zf.tree.flatten_names(zf.functionalize(module_of(name)[0]).params)
    inside = [f"{layer}." for layer in plan.streams] + [f"{x}." for x in plan.pointwise]
    summed = sum(
        x.numel() * 8
        for leaf, x in leaves.items()
        if leaf not in plan.splits and any(leaf.startswith(prefix) for prefix in inside)
    )
    assert parts[0][0]["tensor whole leaves"] == summed


def norm_bytes(name: str) -> int:
    """What all norms of a model keep of a stream, leaves apart."""
    module = module_of(name)[0]
    total = 0
    for part in module.modules():
        if "norm" in type(part).__name__.lower() and not part._modules:
            x = torch.ones(ROWS, LENGTH, part.weight.numel(), dtype=torch.float64).requires_grad_()
            _, count = kept(lambda part=part, x=x: part(x * 1))
            total += count - sum(p.numel() * 8 for p in part.parameters())
    return total


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_norms_and_residuals_keep_is_divided(name: str) -> None:
    """Columns keep their inputs, which have been put together."""
    whole, parts = measured(name, False)[0][1], measured(name, True)[0][1]
    assert whole - parts == norm_bytes(name) * (WAYS - 1) // WAYS


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputed_layers_keep_positions_and_gather_once_more(name: str) -> None:
    whole, parts = measured(name, False, zf.remat), measured(name, True, zf.remat)
    layers, once = module_of(name)[1].config.num_hidden_layers, stream_bytes(name)
    each = norm_bytes(name) // (2 * layers + 1)  # the last norm is outside of layers
    assert whole[0][1] - parts[0][1] == (layers * once + each) * (WAYS - 1) // WAYS
    gather = once * (WAYS - 1) // WAYS
    assert sent(parts) == sent(whole) + WAYS * layers * gather


# --- randomness ----------------------------------------------------------------------------------

Masks = list[tuple[torch.Size, Tensor]]


class Watch(TorchFunctionMode):
    """Masks of functional dropout, and the shape of what is dropped."""

    def __init__(self, seen: Masks) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.dropout and type(args[0]) is Tensor:
            self.seen.append((args[0].shape, out.detach() == 0))
        return out


def dropped(beside: Callable[[Any], Any] = lambda f: f) -> list[tuple[Any, Masks]]:
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    module = gpt2(**rates, attn_implementation="eager")
    model = zf.functionalize(module, train=True)
    start = model.params

    def body() -> tuple[Any, Masks]:
        seen: Masks = []

        def loss(params: Any, batch: Batch) -> Tensor:
            with Watch(seen):
                return loss_with(model)(params, {"input_ids": batch["input_ids"]})

        return trained(model, start, lambda f: beside(on_positions(model, 2)(f)), loss), seen

    return zf.simulate(2)(body)()


def test_every_position_has_a_mask_of_its_own() -> None:
    (mine, masks), (theirs, others) = dropped()
    assert_same(mine, theirs)
    streams = [mask for shape, mask in masks + others if len(shape) == 3 and shape[1] > 1]
    assert len(streams) > 8 and all(0 < mask.double().mean() < 0.5 for mask in streams)
    every = [tuple(mask.flatten().tolist()) for mask in streams]
    assert len(set(every)) == len(every)
    heads = [(a, b) for (x, a), (_, b) in zip(masks, others, strict=True) if len(x) == 4]
    assert heads and not any(torch.equal(a, b) for a, b in heads if a.sum() and b.sum())


def test_recomputed_masks_are_those_of_the_forward() -> None:
    for (mine, _), (theirs, _) in zip(dropped(zf.remat), dropped(), strict=True):
        assert_near(mine, theirs, 1e-12)
