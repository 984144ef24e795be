"""`quantize` beside every other transform, against rounding that is written into the loss by hand.

Law, for each other transform T and what it does at full strength (gradients compressed, layers
dropped, sixteen bits): ``T(quantize(step of loss))`` is ``T(step of rounded loss)``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from tests.laws.cases import ADAMW, Case, assert_near, assert_same, train, trained
from tests.laws.models import stack
from zfunc.quant.fake import fake_quantize
from zfunc.quant.grids import Format

BITS = 4
HOW: dict[str, Any] = {"start_bits": BITS, "target_bits": BITS, "group_size": 4}
F64, F32 = torch.float64, torch.float32


class Through(torch.autograd.Function):
    """Rounded forward, straight through backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return fake_quantize(x, Format(BITS, 4))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def loss_of(rounded: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The mean square error of a stack; weights are multiplied with as ``rounded`` gives them."""

    def block(p: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ rounded(p["w"]) + p["b"])

    def loss(params: Any, batch: Any) -> Tensor:
        first, head = params["first"], params["head"]
        x = batch["x"].to(first["b"].dtype) @ rounded(first["w"]) + first["b"]
        x = zf.scan(block, params["blocks"], x)
        out = x @ rounded(head["w"]) + head["b"]
        return (out.to(batch["y"].dtype) - batch["y"]).square().mean()

    return loss


def case(rounded: Callable[[Tensor], Tensor]) -> Case:
    return trained(lambda dtype: stack(dtype, layers=4), loss_of(rounded))


LOW, BY_HAND = case(lambda w: w), case(Through.apply)
FOLDER = tempfile.TemporaryDirectory(prefix="zfunc-quantize-")

# name -> (transform, ranks, dtype of the state)
OTHERS: dict[str, tuple[Callable[[Any], Any], int, torch.dtype]] = {
    **{
        f"shard {k}": (lambda f, k=k: zf.shard(f, stage=k, unit_bytes=64), 3, F64) for k in range(4)
    },
    "offload to cpu": (zf.offload, 1, F64),
    "offload to disk": (lambda f: zf.offload(f, to="disk", path=FOLDER.name), 1, F64),
    "precision": (zf.precision, 1, F32),
    "precision, scaled": (
        lambda f: zf.precision(f, compute=torch.float16, loss_scale="dynamic"),
        1,
        F32,
    ),
    "accumulate": (lambda f: zf.accumulate(f, 3), 1, F64),
    "remat": (zf.remat, 1, F64),
    "donate": (zf.donate, 1, F64),
    "drop_layers": (lambda f: zf.drop_layers(f, theta=0.3, gamma=0.7), 1, F64),
    "compress_grads to one bit": (lambda f: zf.compress_grads(f, freeze_step=2), 3, F64),
    "compress_grads to int8": (
        lambda f: zf.compress_grads(f, method="int8", freeze_step=0),
        3,
        F64,
    ),
    **{
        f"shard {stage}, compress_grads {how}": (
            lambda f, stage=stage, how=how: zf.shard(
                zf.compress_grads(f, **how), stage=stage, unit_bytes=64
            ),
            2,
            F64,
        )
        for stage, how in (
            (0, {"method": "int4", "freeze_step": 1}),
            (1, {"method": "int8", "freeze_step": 1}),
            (2, {"freeze_step": 2, "gather": "int8"}),
            (3, {"method": "powersgd", "rank": 1, "freeze_step": 1}),
        )
    },
    "shard 1, offload to cpu": (lambda f: zf.shard(zf.offload(f), stage=1), 2, F64),
    "shard 3, offload to disk, remat": (
        lambda f: zf.shard(
            zf.offload(zf.remat(f), to="disk", path=tempfile.mkdtemp(dir=FOLDER.name)), stage=3
        ),
        2,
        F64,
    ),
    "shard 3, compress_grads, drop_layers, remat, accumulate, precision": (
        lambda f: zf.shard(
            zf.compress_grads(
                zf.drop_layers(zf.remat(zf.accumulate(zf.precision(f), 2)), theta=0.3, gamma=0.7),
                method="int8",
                freeze_step=1,
            ),
            stage=3,
        ),
        2,
        F32,
    ),
}


def outcome(step: Any, of: Case, ranks: int, dtype: torch.dtype) -> Any:
    """Losses and the last full state."""

    def body() -> Any:
        metrics, state = train(step, step.place(of.state(ADAMW, dtype)), of, 4, dtype)
        return [row["loss"] for row in metrics], step.unplace(state)

    return zf.simulate(ranks)(body)()[0]


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_rounding_by_hand(name: str) -> None:
    wrap, ranks, dtype = OTHERS[name]
    expected = outcome(wrap(BY_HAND.step(ADAMW)), BY_HAND, ranks, dtype)
    inside = outcome(wrap(zf.quantize(LOW.step(ADAMW), **HOW)), LOW, ranks, dtype)
    assert_near(inside, expected, 1e-12 if dtype == F64 else 1e-6)
    assert_same(outcome(zf.quantize(wrap(LOW.step(ADAMW)), **HOW), LOW, ranks, dtype), inside)
    plain = outcome(wrap(LOW.step(ADAMW)), LOW, ranks, dtype)
    assert max(abs(a - b) for a, b in zip(plain[0], inside[0], strict=True)) > 1e-4
