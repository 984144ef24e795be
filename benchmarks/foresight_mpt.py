"""A stand-in for MPT, as LLM Foundry trains it, and its rows: what ``benchmarks.foresight`` times.

The model is MPT's (https://github.com/mosaicml/llm-foundry, scripts/train/yamls/pretrain): blocks
of LayerNorm, attention and an MLP of four times the width with exact GELU, biases, learned
positions, tied embeddings; heads of 128 features, of 64 below a width of 1,536; a vocabulary of
50,368. This is checked by the number of parameters that each row publishes. Precision is
Composer's (composer/trainer/mosaic_fsdp_utils.py): ``DEFAULT`` gathers in bf16 and reduces in
fp32, ``PURE`` does both in bf16, ``FULL`` both in fp32. The schedule is zfunc's with one unit a
block, one of them gathered ahead, and gradients that leave with each microbatch; attention,
LayerNorm and cross-entropy are fused, everything else is an operator of torch.

A model is foreseen with few blocks and few microbatches. Rows repeat with each further block and
microbatch, so seconds grow by the same amount. A width at which blocks would be merged is refused,
and ``python -m benchmarks.foresight --full`` compares with all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import zfunc as zf
from zfunc import optim
from zfunc.foresight.presets import PRESETS

__all__ = ["COLUMNS", "Case", "NotForeseen", "case_of", "continued", "seconds_of", "traced"]

VOCAB = 50368
DEVICES = {  # as such tables call them, and by the names of presets
    **{name: name for name in PRESETS},
    "h100_80gb": "h100",
    "h200_141gb": "h200",
    "v100_32gb": "v100",
    "a100_80gb": "a100-80",
    "a100_40gb": "a100-40",
}
STAGES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "_HYBRID_SHARD_ZERO2": 2,
}
PRECISIONS = {
    **dict.fromkeys(("amp_bf16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("amp_fp16", "fp16"), torch.float16),
}
NODE = 8  # GPUs, within which a hybrid strategy cuts
# Columns that a row is foreseen by; others may be there.
COLUMNS = (
    *("Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum"),
    *("GlobalBatchSize (T)", "Throughput (T/s)", "Precision", "MP Mode", "Sharding Strategy"),
    *("Activation Checkpointing", "NumParams"),
)
FEW = (3, 4)  # blocks that are foreseen
SHAPES = {  # width and blocks
    "125m": (768, 12),
    "350m": (1024, 24),
    "760m": (1536, 24),
    "1b": (2048, 24),
    "3b": (2560, 32),
    "7b": (4096, 32),
    "13b": (5120, 40),
    "30b": (7168, 48),
    "70b": (8192, 80),
}


class NotForeseen(Exception):
    """A row that there is no stand-in for, and why."""


@dataclass(frozen=True)
class Case:
    """A step of a GPT on ranks with some rows each, without what was measured.

    Attributes:
        device: name of a preset.
        width, depth: features and blocks.
        micro: sequences in a microbatch of one rank; there are ``count`` microbatches.
        stage: of ``shard``; ``hybrid`` cuts within nodes of 8 only.
        compute, reduce: dtypes.
    """

    device: str
    width: int
    depth: int
    gpus: int
    seq: int
    micro: int
    count: int
    stage: int = 3
    hybrid: bool = False
    remat: bool = False
    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32

    @property
    def parameters(self) -> int:
        """How many the model has."""
        w = self.width
        return VOCAB * w + self.seq * w + self.depth * (12 * w * w + 13 * w) + 2 * w

    @property
    def tokens(self) -> int:
        """Of a step, all ranks together."""
        return self.gpus * self.count * self.micro * self.seq

    @property
    def geometry(self) -> Case:
        """What its rows depend on."""
        return replace(self, device="", depth=0, count=0)


def case_of(row: Mapping[str, str]) -> Case:
    """The case that a row describes.

    Raises:
        NotForeseen: why it cannot be.
    """
    model = row["Model"].lower().removeprefix("mpt-")
    device = DEVICES.get(row["GPU"].lower())
    strategy, precision = row["Sharding Strategy"].upper(), row["Precision"].lower()
    mode = row["MP Mode"].upper()
    if model not in SHAPES:
        raise NotForeseen(f"no model {row['Model']!r}: known are {', '.join(SHAPES)}")
    if device is None:
        raise NotForeseen(f"no device {row['GPU']!r}: known are {', '.join(DEVICES)}")
    if "fp8" in precision:
        raise NotForeseen("products in fp8 and the scaling around them")
    if precision not in PRECISIONS:
        raise NotForeseen(f"no precision {row['Precision']!r}: known are {', '.join(PRECISIONS)}")
    if strategy not in STAGES:
        told = row["Sharding Strategy"]
        raise NotForeseen(f"no sharding strategy {told!r}: known are {', '.join(STAGES)}")
    if mode not in ("DEFAULT", "PURE", "FULL"):
        raise NotForeseen(f"no mixed precision {row['MP Mode']!r}: known are DEFAULT, PURE, FULL")
    if _flag(row, "Activation CPUOffload"):
        raise NotForeseen("activations that are kept by the host")
    if mode == "FULL":
        raise NotForeseen("parameters gathered in fp32 and cast by autocast")
    low, (width, depth), gpus = PRECISIONS[precision], SHAPES[model], _whole(row, "# GPUs")
    hybrid = "HYBRID" in strategy and gpus > NODE
    if hybrid and (gpus % NODE or PRESETS[device].get("gpus_per_node", NODE) != NODE):
        raise NotForeseen(f"{strategy} on {gpus} GPUs: known are whole nodes of {NODE}")
    case = Case(
        device=device,
        width=width,
        depth=depth,
        gpus=gpus,
        seq=_whole(row, "SeqLen (T)"),
        micro=_whole(row, "MicroBatchSize"),
        count=_whole(row, "GradAccum"),
        stage=STAGES[strategy],
        hybrid=hybrid,
        remat=_flag(row, "Activation Checkpointing"),
        compute=low,
        reduce=torch.float32 if mode == "DEFAULT" else low,
    )
    if case.parameters != (published := _whole(row, "NumParams")):
        raise NotForeseen(f"{published} parameters, and the stand-in has {case.parameters}")
    if case.tokens != (published := _whole(row, "GlobalBatchSize (T)")):
        raise NotForeseen(
            f"a batch of {published} tokens, and {gpus} GPUs with {case.count} x {case.micro} "
            f"sequences of {case.seq} have {case.tokens}"
        )
    return case


def seconds_of(row: Mapping[str, str]) -> float:
    """Of a step, as published.

    Raises:
        NotForeseen: the row does not say it.
    """
    return _number(row, "GlobalBatchSize (T)") / _number(row, "Throughput (T/s)")


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        found = float(row[name].replace(",", ""))  # which tables have between thousands
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise NotForeseen(f"{name} is {row[name]!r}, expected a number above 0")
    return found


def _whole(row: Mapping[str, str], name: str) -> int:
    found = _number(row, name)
    if found != int(found):
        raise NotForeseen(f"{name} is {row[name]!r}, expected a whole number")
    return int(found)


def _flag(row: Mapping[str, str], name: str) -> bool:
    found = row.get(name, "").lower()
    if found not in ("true", "false", "yes", "no", "1", "0", ""):
        raise NotForeseen(f"{name} is {row[name]!r}, expected True or False")
    return found in ("true", "yes", "1")


def _params(case: Case, depth: int) -> dict[str, Any]:
    w = case.width
    with torch.device("meta"):
        return {
            "embed": torch.empty(VOCAB, w),
            "positions": torch.empty(case.seq, w),
            "blocks": zf.Layers([_block_params(w) for _ in range(depth)]),
            "norm": torch.empty(2, w),
        }


def _block_params(w: int) -> dict[str, Tensor]:
    sizes = {"qkv": (3 * w, w), "out": (w, w), "up": (4 * w, w), "down": (w, 4 * w)}
    weights = {name: torch.empty(size) for name, size in sizes.items()}
    biases = {f"{name} bias": torch.empty(size[0]) for name, size in sizes.items()}
    return {"norm1": torch.empty(2, w), "norm2": torch.empty(2, w), **weights, **biases}


def _linear(p: dict[str, Any], name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[name], p[f"{name} bias"])


def _norm(x: Tensor, scale_and_shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *scale_and_shift.unbind())


def _block(p: dict[str, Any], x: Tensor) -> Tensor:
    features = 64 if x.shape[-1] < 1536 else 128
    qkv = _linear(p, "qkv", _norm(x, p["norm1"]))
    q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, d=features)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + _linear(p, "out", rearrange(y, "b h t d -> b t (h d)"))
    return x + _linear(p, "down", F.gelu(_linear(p, "up", _norm(x, p["norm2"]))))


def _loss(params: Any, ids: Tensor) -> Tensor:
    x = zf.embed(ids[:, :-1], params["embed"]) + params["positions"]
    x = _norm(zf.scan(_block, params["blocks"], x), params["norm"])
    logits = F.linear(x, params["embed"]).flatten(0, -2)
    return zf.kernels.cross_entropy(logits, ids[:, 1:].flatten()).float()


def traced(case: Case, depth: int, count: int) -> zf.Foreseen:
    """A step of the stand-in with so many blocks and microbatches, as rank 0."""
    tx, w = optim.adamw(1e-4), case.width
    block = 12 * w * w + 13 * w
    unit = 4 * max(VOCAB * w + case.seq * w + 2 * w, block)
    if 4 * 2 * block <= unit // 8:
        raise NotForeseen(f"blocks of width {w} are merged, so that rows do not repeat with each")
    mesh = zf.mesh(replica=case.gpus // NODE, data=NODE) if case.hybrid else None
    step: Any = zf.shard(zf.train_step(_loss, tx), stage=case.stage, unit_bytes=unit, mesh=mesh)
    step = zf.precision(zf.donate(step), compute=case.compute, reduce=case.reduce)
    step = zf.remat(step) if case.remat else step
    step = zf.accumulate(step, count) if count > 1 else step
    ids = torch.empty(case.micro * count, case.seq + 1, dtype=torch.int64, device="meta")
    state = zf.TrainState.create(_params(case, depth), tx)
    return zf.foresee(step, state, ids, ranks=case.gpus)


def continued(case: Case, value: Callable[[int, int], float]) -> float:
    """A value at all blocks and microbatches, from its growth over the few that are foreseen.

    Args:
        case: which.
        value: of so many blocks and microbatches.
    """
    few, more = FEW

    def at_full_depth(count: int) -> float:
        growth = value(more, count) - value(few, count)
        return value(few, count) + (case.depth - few) * growth

    if case.count == 1:
        return at_full_depth(1)
    growth = at_full_depth(3) - at_full_depth(2)
    return at_full_depth(2) + (case.count - 2) * growth
