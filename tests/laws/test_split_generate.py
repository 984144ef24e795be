"""Inference on split leaves: the tokens, the bytes and the full leaves of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.covering import Covering
from tests.laws.plans_by_hand import gpt2, llama
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


def texts(model: Any, params: Any) -> list[Tensor]:
    drawn = {"temperature": 1.0, "top_p": 0.9, "key": 7}
    return [zf.generate(model, params, ids(), max_new_tokens=NEW, **how) for how in ({}, drawn)]


@cache
def alone(name: str, form: str) -> tuple[Any, list[Tensor]]:
    """The parameters and the texts of one process."""
    model = model_of(name)
    predict = predict_of(model, form)
    params = model.params if FORMS[form] is None else predict.place(model.params)
    return params, texts(model, params)


CASES = [
    (name, form, ways)
    for name in MODELS
    for form in FORMS
    for ways in (2, 3, 4)
    if Covering.whole or (len(name) + len(form) + ways) % 3 == 0 or form == "full"
]


@pytest.mark.parametrize(("name", "form", "ways"), CASES)
def test_texts_and_leaves_are_those_of_one_process(name: str, form: str, ways: int) -> None:
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
        return texts(model, placed), predict(placed, ids()).logits

    for found, logits in zf.simulate(ways)(rank)():
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)
        want = model.apply(params, ids()).logits
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-9
