"""Inference on split leaves: the tokens, the bytes and the full leaves of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import each
from tests.laws.plans_by_hand import gpt2, llama
from zfunc.errors import PlacementError
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.quant.qtensor import QTensor
from zfunc.trees import tree

pytest.importorskip("transformers")

NEW = 8
MODELS: dict[str, Callable[[], Any]] = {
    "llama, grouped": lambda: llama(8, 4, intermediate_size=52),
    "llama, 1 kv head": lambda: llama(4, 1, intermediate_size=18),
    "llama, 6 heads": lambda: llama(6, 2, intermediate_size=52, tie_word_embeddings=True),
    "gpt2": lambda: gpt2(n_head=6, n_embd=48),
}
FORMS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "8 bits": {"bits": 8, "group_size": 4},
    "4 bits": {"bits": 4, "group_size": 4},
    "4 bits, whole rows": {"bits": 4, "group_size": None, "symmetric": False},
    "8 bits, dynamic": {"bits": 8, "group_size": 4, "dynamic": True},
    "8 bits, dynamic, whole rows": {"bits": 8, "group_size": None, "dynamic": True},
}


@cache
def model_of(name: str) -> Any:
    return zf.functionalize(MODELS[name](), train=False)


def predict_of(model: Any, form: str, **split: Any) -> Any:
    how = FORMS[form]
    fn = model.apply if how is None else zf.quantize(model.apply, **how)
    return zf.split(fn, model, **split) if split else fn


def ids() -> Tensor:
    return torch.randint(2, 40, (3, 5), generator=torch.Generator().manual_seed(1))


HOWS: dict[str, dict[str, Any]] = {
    "likeliest": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "key": 7},
}


def text(model: Any, params: Any, how: str) -> Tensor:
    return zf.generate(model, params, ids(), max_new_tokens=NEW, **HOWS[how])


def texts(model: Any, params: Any) -> list[Tensor]:
    return [text(model, params, how) for how in HOWS]


@cache
def alone(name: str, form: str) -> tuple[Any, list[Tensor]]:
    """The parameters and the texts of one process."""
    model = model_of(name)
    predict = predict_of(model, form)
    params = model.params if FORMS[form] is None else predict.place(model.params)
    return params, texts(model, params)


@pytest.mark.parametrize(
    ("name", "form", "ways", "how"), each(MODELS, FORMS, (2, 3, 4), HOWS, times=2)
)
def test_texts_and_leaves_are_those_of_one_process(
    name: str, form: str, ways: int, how: str
) -> None:
    model, (params, expected) = model_of(name), alone(name, form)
    full = tree.flatten_names(params)

    def rank() -> Any:
        predict = predict_of(model, form, tensor=ways)
        placed = predict.place(model.params)
        whole = tree.flatten_names(zf.full(placed))
        for path, x in whole.items():
            assert type(x) is type(full[path])
            if isinstance(x, QTensor):
                assert x.code == full[path].code
                assert torch.equal(x.to_bytes(), full[path].to_bytes())
            else:
                assert torch.equal(x, full[path])
        back = tree.flatten_names(predict.unplace(placed))
        for path, x in tree.flatten_names(zf.quant.dequantize_tree(params)).items():
            assert torch.equal(back[path], x)
        return text(model, placed, how), predict(placed, ids()).logits

    theirs = dict(zip(HOWS, expected, strict=True))[how]
    for mine, logits in zf.simulate(ways)(rank)():
        assert torch.equal(mine, theirs)
        want = model.apply(params, ids()).logits
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-9


# --- how leaves are split -----------------------------------------------------------------------


def test_rows_are_split_between_groups_where_their_pieces_allow_it() -> None:
    model = zf.functionalize(llama(8, 4, intermediate_size=52), train=False)
    low = zf.quantize(model.apply, bits=4, group_size=8)
    expected = texts(model, low.place(model.params))

    def rank() -> Any:
        placed = zf.split(low, model, tensor=3).place(model.params)
        shapes = {slot.path: slot.own for slot in placed.layout.present}
        return shapes, texts(model, placed)

    found = zf.simulate(3)(rank)()
    down, o = (f"model.layers.0.{x}.weight" for x in ("mlp.down_proj", "self_attn.o_proj"))
    assert [shapes[down][1] for shapes, _ in found] == [24, 16, 12]  # and not 18, 17, 17
    assert [shapes[o][1] for shapes, _ in found] == [16, 8, 8]  # a group is two heads
    for _, mine in found:
        assert all(map(torch.equal, mine, expected))


def raised(ways: int, rank: Callable[[], Any]) -> str:
    with pytest.raises(PlacementError) as error:
        zf.simulate(ways)(rank)()
    return str(error.value)


def test_groups_that_heads_do_not_fit_are_an_error() -> None:
    model = zf.functionalize(llama(4, 4, intermediate_size=32), train=False)  # heads of 4 features
    low = zf.quantize(model.apply, bits=8, group_size=8)
    said = raised(4, lambda: zf.split(low, model, tensor=4).place(model.params))
    assert "self_attn.o_proj.weight has a scale for each 8 of its 16 inputs, and 4 ranks" in said
    assert "Take group_size=4, which fits these borders, or None" in said
    fine = zf.quantize(model.apply, bits=8, group_size=8, include="*.q_proj.weight")
    zf.simulate(4)(lambda: zf.split(fine, model, tensor=4).place(model.params))()


def test_rules_say_at_which_grain_rows_are_split() -> None:
    params = {"up": torch.randn(52, 6), "down": torch.randn(6, 52)}

    def mlp(params: Any, x: Tensor) -> Tensor:
        return zf.row(zf.column(x, params["up"]).relu(), params["down"])

    low, x = zf.quantize(mlp, bits=4, group_size=8), torch.randn(3, 6)
    want = low(low.place(params), x)

    def rank(**grain: int) -> Tensor:
        rules = {"up": zf.Cut(0, **grain), "down": zf.Cut(1, **grain)}
        predict = zf.split(low, rules=rules, tensor=3)
        out: Tensor = predict(predict.place(params), x)
        return out

    for y in zf.simulate(3)(lambda: rank(grain=8))():
        assert float((y - want).abs().max() / want.abs().max()) < 1e-3  # inputs in 16 bits
    said = raised(3, rank)
    assert "down has a scale for each 8 of its 52 inputs" in said and "zf.Cut(..., grain=8)" in said
    assert "falls into 2 blocks" in raised(3, lambda: rank(grain=32))


def test_a_function_that_evaluate_made_is_no_step() -> None:
    params = {"up": torch.randn(8, 6).double(), "down": torch.randn(6, 8).double()}

    def mlp(params: Any, x: Tensor) -> Tensor:
        return zf.row(zf.column(x, params["up"]).relu(), params["down"])

    x = torch.randn(3, 6).double()
    want = mlp(params, x)

    def rank() -> Tensor:
        rules = {"up": zf.Cut(0), "down": zf.Cut(1)}
        predict = zf.split(zf.evaluate(mlp), rules=rules, tensor=2)
        placed = predict.place(params)
        assert placed["up"].shape == (4, 6) and placed["up"].data_ptr() != params["up"].data_ptr()
        assert torch.equal(predict.unplace(placed)["down"], params["down"])
        out: Tensor = predict(placed, x)
        return out

    for y in zf.simulate(2)(rank)():
        assert torch.allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("form", ["full", "4 bits"])
def test_beside_shard_each_rank_has_a_part_of_its_part(form: str, stage: int) -> None:
    name = "llama, grouped"
    model, (params, expected) = model_of(name), alone(name, form)
    full = tree.flatten_names(params)

    def rank() -> Any:
        mesh = zf.mesh(data=2, tensor=2)
        predict = zf.shard(predict_of(model, form, mesh=mesh), stage=stage)
        placed = predict.place(model.params)
        for path, x in tree.flatten_names(zf.full(placed)).items():
            same = x.to_bytes() if isinstance(x, QTensor) else x
            theirs = full[path].to_bytes() if isinstance(x, QTensor) else full[path]
            assert torch.equal(same, theirs)
        return texts(model, placed)

    for mine in zf.simulate(4)(rank)():
        assert all(map(torch.equal, mine, expected))


def test_another_order_of_wrapping_changes_nothing() -> None:
    model, (_, expected) = model_of("gpt2"), alone("gpt2", "4 bits")

    def rank() -> Any:
        split = zf.split(model.apply, model, tensor=2)
        return texts(model, zf.quantize(split, **(FORMS["4 bits"] or {})).place(model.params))

    for mine in zf.simulate(2)(rank)():
        assert all(map(torch.equal, mine, expected))


# --- bytes -------------------------------------------------------------------------------------


def bytes_of(x: Tensor, split: Any, rank: int) -> int:
    """Of a rank's part of a leaf, by the plan alone."""
    if split is None:
        return x.nbytes
    if not isinstance(x, QTensor):
        return math.prod(split.shape(x.shape, rank)) * x.itemsize
    code = x.code.resized(split.dim, split.width(rank))
    return sum(n * m * dtype.itemsize for (n, m), dtype in code.parts)


@pytest.mark.parametrize("form", ["full", "8 bits", "4 bits"])
@pytest.mark.parametrize("ways", [2, 3, 4])
def test_bytes_are_those_of_the_plan(form: str, ways: int) -> None:
    name = "llama, grouped"
    model, (params, _) = model_of(name), alone(name, form)
    leaves = tree.flatten_names(params)

    def rank() -> Any:
        predict = predict_of(model, form, tensor=ways)
        placed = predict.place(model.params)
        splits = {s.path: s.split for s in placed.layout.present}
        plan = placed.layout.plan.splits
        assert {k: v for k, v in splits.items() if v} == plan and len(plan) >= 16
        wanted = sum(bytes_of(x, plan.get(k), zf.rank()) for k, x in leaves.items())
        return zf.tree.size_bytes(placed), wanted

    for held, wanted in zf.simulate(ways)(rank)():
        assert held == wanted


@pytest.mark.parametrize(("ways", "low"), each([2, 4], [False, True]))
def test_ranks_have_even_shares_of_a_model_that_divides(low: bool, ways: int) -> None:
    more = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 16384, "head_dim": 64}
    model = zf.functionalize(llama(4, 4, **more), train=False)
    fn = zf.quantize(model.apply, bits=4, group_size=32) if low else model.apply
    full = fn.place(model.params) if low else model.params  # type: ignore[attr-defined]
    size = zf.tree.size_bytes(full)
    assert sum(x.numel() for x in zf.tree.leaves(model.params)) > 10_000_000

    def rank() -> int:
        return zf.tree.size_bytes(zf.split(fn, model, tensor=ways).place(model.params))

    assert all(abs(ways * held / size - 1) < 0.05 for held in zf.simulate(ways)(rank)())


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_ranks_read_their_parts_from_files(
    form: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gpt2"
    model, (params, expected) = model_of(name), alone(name, form)
    full = tree.flatten_names(params)
    zf.export_safetensors(tmp_path, model.params)
    whole = form.endswith("whole rows")
    plain = SafetensorsFiles.read
    read: set[str] = set()

    def noted(self: SafetensorsFiles, name: str) -> Tensor:
        read.add(name)
        return plain(self, name)

    monkeypatch.setattr(SafetensorsFiles, "read", noted)

    def rank() -> Any:
        predict = predict_of(model, form, tensor=2)
        placed = predict.place(tmp_path)
        for path, x in tree.flatten_names(zf.full(placed)).items():
            if isinstance(x, QTensor):
                assert x.code == full[path].code
                assert torch.equal(x.to_bytes(), full[path].to_bytes())
            else:
                assert torch.equal(x, full[path])
        return texts(model, placed), set(placed.layout.plan.splits)

    for mine, split in zf.simulate(2)(rank)():
        assert all(map(torch.equal, mine, expected))
        # A row with one scale takes all of the leaf to find it.
        rows = {f"transformer.h.{i}.{x}.weight" for i in (0, 1) for x in
                ("attn.c_proj", "mlp.c_proj")}  # fmt: skip
        assert read & split == (rows & split if whole else set())


def test_a_file_of_low_bits_is_split_as_it_is(tmp_path: Any) -> None:
    model, (params, expected) = model_of("gpt2"), alone("gpt2", "4 bits")
    file = zf.quant.save(tmp_path / "low.safetensors", params)

    def rank() -> Any:
        return texts(model, predict_of(model, "4 bits", tensor=2).place(file))

    for mine in zf.simulate(2)(rank)():
        assert all(map(torch.equal, mine, expected))


def test_checkpoints_of_parts_in_low_bits_are_refused(tmp_path: Any) -> None:
    model = model_of("gpt2")

    def rank() -> None:
        zf.save(tmp_path, predict_of(model, "4 bits", tensor=2).place(model.params), step=1)

    assert "is in low bits, and 2 ranks have parts of it" in raised(2, rank)


def test_ranks_that_begin_with_other_parameters_are_told() -> None:
    model = model_of("gpt2")

    def rank() -> None:
        params = zf.tree.map(lambda x: x + zf.rank(), model.params)
        zf.split(model.apply, model, tensor=2).place(params)

    assert "start from different params" in raised(2, rank)


def test_full_parameters_are_no_parts() -> None:
    model = model_of("gpt2")

    def rank() -> None:
        zf.split(model.apply, model, tensor=2)(model.params, ids())

    assert "is not split along 'tensor'" in raised(2, rank)
