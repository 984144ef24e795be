"""Inference on stages: the tokens, the outputs and the bytes of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from tests.laws.architectures import GROUPED, built
from tests.laws.covering import Covering, each
from tests.laws.plans_by_hand import gpt2, llama, spread, widened
from tests.unit.live_bytes import Peak
from zfunc import optim
from zfunc.errors import CompositionError, PlacementError
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.language import gpt, staged_generation
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.probing.arguments import tensors_in
from zfunc.quant.qtensor import QTensor
from zfunc.ranks.accounting import ledger
from zfunc.rehearsal.ghosts import Ghost
from zfunc.trees import tree

pytest.importorskip("transformers")

NEW = 8
CONFIG = gpt.GPTConfig(vocab=13, width=16, depth=5, heads=2, tied=True)


@cache
def hand() -> tuple[Any, Any, Any]:
    """A decoder, a function of its parameters, and these."""
    noise = lambda x: zf.random.normal(zf.random.key(x.numel()), x.shape).double() * 0.3  # noqa: E731
    params = zf.tree.map(noise, gpt.init(CONFIG, zf.random.key(3)))
    return GPTDecoder(CONFIG), zf.evaluate(partial(gpt.apply, config=CONFIG)), params


def module(make: Callable[[], Any]) -> Callable[[], tuple[Any, Any, Any]]:
    @cache
    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = zf.functionalize(make(), train=False)
        return model, model.apply, model.params

    return made


class Plain(nn.Module):
    """Without a cache: each token runs the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).cumsum(1)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def hugging(kind: str, **more: Any) -> Any:
    return widened(spread(built(kind, **{**GROUPED, "num_hidden_layers": 4, **more})))


def mixtral() -> Any:
    made = hugging("MixtralForCausalLM", num_local_experts=3)
    made.set_experts_implementation("eager")  # torch's grouped products know no float64
    return made


MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "gpt": hand,
    "llama": module(lambda: llama(8, 4, intermediate_size=52, num_hidden_layers=4)),
    "tied llama": module(lambda: llama(4, 2, num_hidden_layers=4, tie_word_embeddings=True)),
    "gpt2": module(lambda: gpt2(n_head=6, n_embd=48, n_layer=4)),
    "gemma2": module(lambda: hugging("Gemma2ForCausalLM", sliding_window=4)),
    "mistral": module(lambda: hugging("MistralForCausalLM", sliding_window=4)),
    "mixtral": module(mixtral),
    "uncached": module(lambda: Plain().double()),
}
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "8 bits": {"bits": 8, "group_size": 4},
    "4 bits": {"bits": 4, "group_size": 4},
    "4 bits, whole rows": {"bits": 4, "group_size": None, "symmetric": False},
    "8 bits, dynamic": {"bits": 8, "group_size": 4, "dynamic": True},
}


def ids(n: int = 5) -> Tensor:
    return torch.randint(2, 13, (n, 6), generator=torch.Generator().manual_seed(1))


def padding() -> Tensor:
    mask = torch.ones(5, 6, dtype=torch.int64)
    mask[1, :2] = mask[3, :1] = 0
    return mask


DRAWN = {"temperature": 1.0, "top_p": 0.9, "key": 7}
HOWS: dict[str, dict[str, Any]] = {
    "likeliest": {},
    "drawn": DRAWN,
    "that stop": {"stop": 3},
    "drawn, that stop": {**DRAWN, "stop": (3, 4, 5, 6, 7, 8)},
    "padded": {"attention_mask": padding()},
}


def hows(name: str, turn: int | None = None) -> list[str]:
    """Ways to generate: all that a model knows; or half of them, the others at the next turn."""
    every = [how for how in HOWS if how != "padded" or name != "uncached"]
    return every if turn is None or Covering.whole else every[turn % 2 :: 2]


def one_way(turn: int) -> list[str]:
    """One of all ways to generate, another one at the next turn."""
    every = [*HOWS]
    return every if Covering.whole else [every[turn % len(every)]]


def texts(decoder: Any, params: Any, some: Iterable[str] = HOWS) -> dict[str, Tensor]:
    return {
        how: zf.generate(decoder, params, ids(), max_new_tokens=NEW, **HOWS[how]) for how in some
    }


def assert_texts(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found
    for how, text in found.items():
        assert torch.equal(text, wanted[how]), how


@cache
def alone(name: str, form: str = "full") -> tuple[Any, dict[str, Tensor], Any]:
    """The parameters, the texts and the logits of one process."""
    decoder, apply, params = MODELS[name]()
    low = zf.quantize(apply, **FORMS[form]) if FORMS[form] else apply
    held = low.place(params) if FORMS[form] else params
    return held, texts(decoder, held, hows(name)), logits_of(apply(held, ids()))


def logits_of(out: Any) -> Tensor:
    logits: Tensor = getattr(out, "logits", out)
    return logits


def predict_of(name: str, form: str, **how: Any) -> Any:
    _, apply, _ = MODELS[name]()
    low = zf.quantize(apply, **FORMS[form]) if FORMS[form] else apply
    return zf.pipeline(low, microbatches=2, **how)


CASES = [(name, "full", pipe) for name, pipe in each(MODELS, (2, 4))] + [
    (name, form, pipe)
    for name in ("gpt", "llama", "gpt2")
    for form in list(FORMS)[1:]
    for pipe in (2, 3, 4)
    if Covering.whole or (len(name) + len(form) + pipe) % 4 == 0
]


@pytest.mark.parametrize(("name", "form", "pipe"), CASES)
def test_texts_and_outputs_are_those_of_one_process(name: str, form: str, pipe: int) -> None:
    (decoder, _, params), (held, expected, logits) = MODELS[name](), alone(name, form)
    full = tree.flatten_names(held)
    some = hows(name, list(MODELS).index(name) + list(FORMS).index(form) + pipe // 2)

    def rank() -> Any:
        predict = predict_of(name, form, pipe=pipe)
        placed = predict.place(params)
        for path, x in tree.flatten_names(zf.full(placed)).items():
            same, theirs = x, full[path]
            if isinstance(x, QTensor):
                assert x.code == theirs.code
                same, theirs = x.to_bytes(), theirs.to_bytes()
            assert torch.equal(same, theirs)
        out = logits_of(predict(placed, ids()))
        layout, me = placed.layout, zf.rank()
        mine = [layout.flats[i] for unit in layout.units if unit.chunk == me for i in unit.flats]
        assert zf.tree.size_bytes(placed) == sum(x.length * x.dtype.itemsize for x in mine)
        every = sum(x.length * x.dtype.itemsize for x in layout.flats)
        return texts(decoder, placed, some), out, (zf.tree.size_bytes(placed), every)

    runs = zf.simulate(pipe)(rank)()
    for mine, out, _ in runs:
        assert_texts(mine, expected)
        assert float((out - logits).abs().max()) < 1e-9 * float(logits.abs().max())
        assert torch.equal(out, runs[0][1])
    assert sum(mine for *_, (mine, _) in runs) == runs[0][2][1]  # each element is on one rank


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pytest.mark.parametrize("name", ["gpt", "gemma2"])
def test_a_rank_may_have_several_parts_of_the_model(name: str, schedule: str) -> None:
    (decoder, _, params), (_, expected, _) = MODELS[name](), alone(name)
    some = hows(name, len(name) + len(schedule))

    def rank() -> dict[str, Tensor]:
        placed = predict_of(name, "full", pipe=2, schedule=schedule).place(params)
        return texts(decoder, placed, some)

    for mine in zf.simulate(2)(rank)():
        assert_texts(mine, expected)


@pytest.mark.parametrize(
    ("outer", "form"), each(["split", "pipeline"], ["full", "8 bits", "4 bits"])
)
def test_stages_may_be_split(outer: str, form: str) -> None:
    (model, apply, params), (_, expected, _) = MODELS["llama"](), alone("llama", form)
    low = zf.quantize(apply, **FORMS[form]) if FORMS[form] else apply
    some = one_way(2 * list(FORMS).index(form) + (outer == "split"))

    def rank() -> Any:
        if outer == "split":
            predict = zf.split(zf.pipeline(low, 2, pipe=2), model, tensor=2)
        else:
            predict = zf.pipeline(zf.split(low, model, tensor=2), 2, pipe=2)
        placed = predict.place(params)
        size = zf.tree.size_bytes(placed)
        return texts(model, placed, some), logits_of(predict(placed, ids())), size

    runs = zf.simulate(4)(rank)()
    for mine, out, _ in runs:
        assert_texts(mine, expected)
        assert torch.equal(out, runs[0][1])
    assert max(size for *_, size in runs) < 0.5 * zf.tree.size_bytes(alone("llama", form)[0])


@pytest.mark.parametrize("stage", [None, 0, 1, 3])
def test_texts_of_a_state_in_training(stage: int | None) -> None:
    """Those of the same parameters on one process; a step is taken before."""
    decoder, _, params = MODELS["gpt"]()
    tx = optim.adamw(0.05)
    step = zf.train_step(lambda p, batch: gpt.loss(p, batch, CONFIG), tx)
    state = zf.accumulate(step, 2).place(zf.TrainState.create(params, tx))
    state, _ = zf.accumulate(step, 2)(state, ids(4))
    some = hows("gpt", stage or 0)
    expected = texts(decoder, state.params, some)

    def rank() -> dict[str, Tensor]:
        mesh = zf.mesh(pipe=2) if stage is None else zf.mesh(pipe=2, data=2)
        mine = zf.pipeline(step, 2, mesh=mesh)
        mine = mine if stage is None else zf.shard(mine, stage=stage)
        state, _ = mine(mine.place(zf.TrainState.create(params, tx)), ids(4))
        return texts(decoder, state.params, some)

    for mine in zf.simulate(2 if stage is None else 4)(rank)():
        assert_texts(mine, expected)


def split(step: Any) -> Any:
    return zf.split(step, rules=gpt.rules(CONFIG), tensor=2)


BESIDE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "precision": (lambda step: zf.precision(step, torch.bfloat16), 2),
    "offload": (lambda step: zf.offload(step, to="cpu"), 2),
    "split": (split, 4),
}


@pytest.mark.parametrize("name", BESIDE)
def test_texts_of_a_state_in_training_beside(name: str) -> None:
    wrap, ranks = BESIDE[name]
    decoder, _, full = MODELS["gpt"]()
    params, tx = zf.tree.map(lambda x: x.float(), full), optim.adamw(0.05)
    step = zf.train_step(lambda p, batch: gpt.loss(p, batch, CONFIG), tx)
    one = wrap(step) if name == "precision" else zf.Step(step)
    some = hows("gpt", [*BESIDE].index(name))
    expected = texts(decoder, one.place(zf.TrainState.create(params, tx)).params, some)

    def rank() -> dict[str, Tensor]:
        mine = zf.pipeline(wrap(step), 2, pipe=2)
        return texts(decoder, mine.place(zf.TrainState.create(params, tx)).params, some)

    for mine in zf.simulate(ranks)(rank)():
        assert_texts(mine, expected)


def test_one_text_a_long_prompt_and_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, params = MODELS["llama"]()
    monkeypatch.setattr("zfunc.language.generation.CHUNK", 4)
    text = ids()[0]

    def run(params: Any) -> Any:
        seen: list[Tensor] = []
        how: Any = {"max_new_tokens": NEW, "stop": 3, "stream": seen.append}
        alone = zf.generate(model, params, text, **how)
        return alone, zf.generate(model, params, ids(), **how), torch.cat(seen)

    expected = run(params)
    for mine in zf.simulate(4)(lambda: run(predict_of("llama", "full", pipe=4).place(params)))():
        assert all(map(torch.equal, mine, expected))


# --- what ranks read and hold --------------------------------------------------------------------


@pytest.mark.parametrize(("form", "tensor"), each(FORMS, [1, 2]))
def test_ranks_read_what_is_theirs(
    form: str, tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, apply, params), (_, expected, _) = MODELS["gpt2"](), alone("gpt2", form)
    zf.export_safetensors(tmp_path, params)
    plain, read = SafetensorsFiles.read, list[tuple[int, str]]()
    some = one_way(2 * list(FORMS).index(form) + tensor)

    def noted(self: SafetensorsFiles, name: str) -> Tensor:
        read.append((zf.rank(), name))
        return plain(self, name)

    monkeypatch.setattr(SafetensorsFiles, "read", noted)

    def rank() -> Any:
        low = zf.quantize(apply, **FORMS[form]) if FORMS[form] else apply
        low = zf.split(low, model, tensor=2) if tensor > 1 else low
        placed = zf.pipeline(low, 2, pipe=2).place(tmp_path)
        chunks = {
            placed.layout.slots[i].path: u.chunk for u in placed.layout.units for i in u.slots
        }
        return texts(model, placed, some), chunks, placed.layout

    runs = zf.simulate(2 * tensor)(rank)()
    for mine, _, _ in runs:
        assert_texts(mine, expected)
    if tensor == 1:
        assert runs[0][2] == runs[1][2]
    for at, name in read:
        assert runs[0][1][name] == at // tensor, name
    assert read or tensor > 1


@contextmanager
def gathers_counted() -> Iterator[list[tuple[int, int]]]:
    """(rank, elements) of each buffer into which parameters are gathered."""
    from zfunc.engine import unit_info

    seen: list[tuple[int, int]] = []
    plain = unit_info.pool

    class Counted:
        def __init__(self, ranks: Any) -> None:
            self.pool = plain(ranks)

        def take(self, length: int, *how: Any) -> Tensor:
            seen.append((zf.rank(), length))
            return self.pool.take(length, *how)

    unit_info.pool = Counted  # type: ignore[assignment]
    try:
        yield seen
    finally:
        unit_info.pool = plain


def test_a_rank_has_its_stage_and_what_is_lent() -> None:
    """Nothing is gathered where ranks along data are one; what is sent is boundaries, tokens, and
    the tied table once."""
    decoder, _, params = MODELS["gpt"]()
    table = params["embed"].nbytes

    def rank() -> Any:
        placed = predict_of("gpt", "full", pipe=2).place(params)
        mine = sum(x.nbytes for x in placed.flats)
        with ledger() as sent:
            zf.generate(decoder, placed, ids(4), max_new_tokens=NEW)
        assert {kind for kind, n in sent.by_kind.items() if n} <= {"send", "exchange", "header"}
        return mine, sent.by_kind["send"]

    with gathers_counted() as gathered:
        runs = zf.simulate(2)(rank)()
    assert gathered == []
    flat = -(-table // 8 // 64) * 64 * 8  # filled up
    boundary = 4 * CONFIG.width * 8
    first = flat + boundary * 6 + boundary * (NEW - 1)
    assert runs[0][1] == first
    assert runs[1][1] == 4 * 8 * NEW
    assert sum(mine for mine, _ in runs) <= 1.2 * zf.tree.size_bytes(params)


class PeakOfStage(Peak):
    """Of tensors that this rank has or makes. Its thread may also gather into another rank's, and
    what other stages have takes no memory."""

    def __init__(self, flats: Sequence[Tensor]) -> None:
        super().__init__()
        self.count(flats)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if Ghost not in types:
            given = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
            self.count([x for x in tensors_in(result) if x.untyped_storage()._cdata not in given])
        return result


@pytest.mark.parametrize("stage", [None, 3])
def test_what_lives_is_a_stage_what_is_lent_and_a_unit(stage: int | None) -> None:
    config = gpt.GPTConfig(vocab=13, width=128, depth=8, heads=2, tied=True)  # few activations
    params = gpt.init(config, zf.random.key(1))
    block, table = (zf.tree.size_bytes(params[name]) for name in ("blocks", "embed"))
    block //= config.depth
    text = ids()[0]

    def rank() -> int:
        fn = zf.evaluate(partial(gpt.apply, config=config))
        if stage is None:
            predict = zf.pipeline(fn, 2, pipe=4)
        else:
            mesh = zf.mesh(pipe=4, data=2)
            predict = zf.shard(zf.pipeline(fn, 2, mesh=mesh), stage=stage, unit_bytes=8 * block)
        placed = predict.place(params)
        with PeakOfStage(placed.flats) as peak:
            zf.generate(GPTDecoder(config), placed, text, max_new_tokens=3)
        return peak.bytes

    for peak in zf.simulate(4 if stage is None else 8)(rank)():
        held = 2 * block  # all of a stage; or its half and a unit
        assert held <= peak < held + table + 0.2 * block


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_cut_is_gathered_a_unit_at_a_time(stage: int) -> None:
    decoder, apply, params = MODELS["gpt"]()

    def rank() -> Any:
        predict = zf.shard(zf.pipeline(apply, 2, mesh=zf.mesh(pipe=2, data=2)), stage=stage)
        placed = predict.place(params)
        layout, me = placed.layout, zf.rank() // 2
        own = {layout.flats[f].length for u in layout.units if u.chunk == me for f in u.flats}
        assert max(map(len, placed.flats)) <= max(own) // 2 + 64
        return zf.generate(decoder, placed, ids(4), max_new_tokens=3), own

    with gathers_counted() as gathered:
        runs = zf.simulate(4)(rank)()
    want = zf.generate(decoder, params, ids(4), max_new_tokens=3)
    for at, (found, own) in enumerate(runs):
        assert torch.equal(found, want)
        its = [length for who, length in gathered if who == at]
        assert its and set(its) <= own


@pytest.mark.parametrize(
    ("name", "counts"), [("gpt", (3, 2)), ("llama", (2, 2)), ("gemma2", (2, 2))]
)
def test_caches_stay_with_their_stage(
    name: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _, params = MODELS[name]()
    held: dict[int, list[Any]] = {}
    plain = staged_generation.StagedTexts.end

    def end(self: Any) -> None:
        held[zf.rank()] = [group.cache for group in self.groups]
        plain(self)

    def rank() -> None:
        placed = predict_of(name, "full", pipe=2).place(params)
        zf.generate(decoder, placed, ids(), max_new_tokens=4)

    monkeypatch.setattr(staged_generation.StagedTexts, "end", end)
    zf.simulate(2)(rank)()
    for at, caches in held.items():
        for kept in caches:
            layers = getattr(kept, "blocks", None) or kept.layers
            there = [x.keys is not None for x in layers]
            assert there == [(i >= counts[0]) == bool(at) for i in range(sum(counts))]


def test_files_checkpoints_and_initialisers_make_a_stages_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements that are read are those that the rank has; what is made is as large as that."""
    _, _, params = MODELS["gpt"]()
    tx = optim.adamw(0.05)
    zf.export_safetensors(tmp_path / "files", params)
    zf.save(tmp_path / "state", zf.TrainState.create(params, tx), step=0)
    step = zf.pipeline(zf.train_step(lambda p, x: gpt.loss(p, x, CONFIG), tx), 2, pipe=2)
    read = {0: 0, 1: 0}
    plain = SafetensorsFiles.fill

    def noted(self: SafetensorsFiles, name: str, elements: Any, out: Tensor) -> None:
        read[zf.rank()] += out.numel()
        plain(self, name, elements, out)

    monkeypatch.setattr(SafetensorsFiles, "fill", noted)

    def rank() -> Any:
        state = step.place(zf.TrainState.create(params, tx))
        size = zf.tree.size_bytes(state)
        mine = sum(x.numel() for piece in [state.params.pieces()] for x in piece.values())
        new = zf.import_safetensors(tmp_path / "files", like=state.params)
        made = step.init(lambda: zf.TrainState.create(zf.tree.map(torch.clone, params), tx))
        again = zf.restore(tmp_path / "state", like=state)
        assert zf.tree.size_bytes(made) == zf.tree.size_bytes(again) == size
        assert zf.tree.size_bytes(new) == zf.tree.size_bytes(state.params)
        for one in (new, made.params, again.params):
            assert all(map(torch.equal, one.flats, state.params.flats))
        return mine, size

    runs = zf.simulate(2)(rank)()
    assert [mine for mine, _ in runs] == [read[0], read[1]]
    assert sum(read.values()) == sum(x.numel() for x in zf.tree.leaves(params))
    full = zf.tree.size_bytes(zf.TrainState.create(params, tx))
    assert sum(size for _, size in runs) < 1.2 * full


# --- bad input -----------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused() -> None:
    model, apply, params = MODELS["llama"]()

    def raised(run: Callable[[], Any], kind: Any = PlacementError) -> str:
        with pytest.raises(kind) as error:
            zf.simulate(2)(run)()
        return str(error.value)

    fn = zf.evaluate(lambda p, x: x)
    assert "the model must be known" in raised(lambda: zf.pipeline(fn, 2, pipe=2).place("nowhere"))
    said = raised(lambda: zf.pipeline(apply, 2, pipe=2)(params, ids()))
    assert "pipeline" in said
    step = zf.pipeline(apply, 2, pipe=2)
    assert "stage 1 of a pipeline was given other texts" in raised(
        lambda: zf.generate(model, step.place(params), ids() + zf.rank(), max_new_tokens=2)
    )
    for way in ("key", "temperature"):
        drawn = {"key": 0, "temperature": 1.0}

        def texts(way: str = way, drawn: dict[str, Any] = drawn) -> Tensor:
            own = {**drawn, way: drawn[way] + zf.rank()}
            return zf.generate(model, step.place(params), ids(), max_new_tokens=2, **own)

        assert "stage 1 of a pipeline was given other texts" in raised(texts)
    assert "rows" in raised(lambda: step(step.place(params), ids() + zf.rank()))
    assert "layers" in raised(
        lambda: zf.pipeline(apply, 2, pipe=2, schedule="interleaved", chunks=4).place(params)
    )
    with pytest.raises(CompositionError):
        zf.pipeline(step, 2, pipe=2)


def test_outputs_without_rows_go_through_in_one_piece() -> None:
    _decoder, _, params = MODELS["gpt"]()

    def mean(params: Any, batch: Tensor, scale: float) -> Any:
        logits = gpt.apply(params, batch, CONFIG)
        return {"mean": logits.mean() * scale, "rows": logits[:, -1]}

    want = mean(params, ids(), 2.0)

    def rank() -> Any:
        predict = zf.pipeline(zf.evaluate(mean), 3, pipe=2)
        return predict(predict.place(params), ids(), 2.0)

    for found in zf.simulate(2)(rank)():
        assert float(abs(found["mean"] - want["mean"])) < 1e-12
        assert torch.allclose(found["rows"], want["rows"], rtol=1e-12)


@pytest.mark.parametrize("name", ["llama", "uncached"])
def test_in_inference_mode(name: str) -> None:
    model, apply, params = MODELS[name]()

    def rank() -> Any:
        predict = zf.pipeline(apply, 2, pipe=2)
        placed = predict.place(params)
        with torch.inference_mode():
            given = ids().clone()
            return predict(placed, given), zf.generate(model, placed, given, max_new_tokens=3)

    want, texts = apply(params, ids()), zf.generate(model, params, ids(), max_new_tokens=3)
    for out, continued in zf.simulate(2)(rank)():
        assert torch.equal(continued, texts)
        torch.testing.assert_close(*map(logits_of, (out, want)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("labelled", [False, True])
def test_an_output_keeps_the_order_of_its_parts(labelled: bool) -> None:
    """``out[1]`` is what it is on one process, though the cache stays with its stage."""
    _model, apply, params = MODELS["llama"]()
    given = {"input_ids": ids(4), "output_hidden_states": True}
    given |= {"labels": ids(4)} if labelled else {}

    def rank() -> Any:
        predict = zf.pipeline(apply, 2, pipe=2)
        return predict(predict.place(params), **given)

    want = [*apply(params, **given)]
    assert [[*out] for out in zf.simulate(2)(rank)()] == [want, want]
