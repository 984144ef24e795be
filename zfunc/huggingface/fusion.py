"""Kernels in the place of norms, activations, rotary positions and losses of known modules.

:func:`fuse` gives instances of known types another ``forward``; the classes, the parameters and all
else stay as they are. Parts of Hugging Face's models are known by how their ``forward`` is written
(:mod:`zfunc.huggingface.likeness`), those of torch by their type; a module with hooks on a part
that would no longer be called is left alone. Arguments for which a kernel would give another dtype
or another memory layout than the module take the module's own way.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zfunc import kernels
from zfunc.huggingface.likeness import (
    MODELS,
    genuine,
    remembering,
    same_forward,
    shadowed,
    specimen,
    watched,
)
from zfunc.huggingface.rotations import Tables, makers, mark_tables, turned_attention
from zfunc.kernels.normalization_torch import wide
from zfunc.kernels.operators import numbers

__all__ = ["activation", "fuse", "fusible", "known_as"]

T = TypeVar("T")
Forward = Callable[..., Any]


@dataclass(frozen=True)
class RMSNorm:
    """How a module is an RMSNorm.

    Attributes:
        eps: the name of what is added to the mean square.
        weight: the name of the weight; None if there is none.
        scaled: the name of a flag that says whether there is one.
        offset: added to the weight.
        promotes: the weight's dtype takes part in that of the result.
    """

    eps: str = "variance_epsilon"
    weight: str | None = "weight"
    scaled: str | None = None
    offset: float = 0.0
    promotes: bool = False


@dataclass(frozen=True)
class Gated:
    """How a module is ``down(dropout(act(gate(x)) * up(x)))``.

    Attributes:
        gate, up, down: the names of its products; ``up`` is None where ``gate`` makes both, one
            behind the other.
        act: the name of the activation; None for SiLU.
        dropout: the name of the dropout, if there is one.
        casts: what ``down`` is given has the dtype of its weight.
    """

    gate: str = "gate_proj"
    up: str | None = "up_proj"
    down: str = "down_proj"
    act: str | None = "act_fn"
    dropout: str | None = None
    casts: bool = False


NORMS = {
    "llama.modeling_llama.LlamaRMSNorm": RMSNorm(promotes=True),
    "t5.modeling_t5.T5LayerNorm": RMSNorm(promotes=True),
    "olmo2.modeling_olmo2.Olmo2RMSNorm": RMSNorm(),
    "helium.modeling_helium.HeliumRMSNorm": RMSNorm(),
    "gemma.modeling_gemma.GemmaRMSNorm": RMSNorm("eps", offset=1.0),
    "gemma3n.modeling_gemma3n.Gemma3nRMSNorm": RMSNorm("eps", scaled="with_scale"),
    "nanochat.modeling_nanochat.NanoChatRMSNorm": RMSNorm("eps", weight=None),
}
NETWORKS = {
    "llama.modeling_llama.LlamaMLP": Gated(),
    "t5gemma.modeling_t5gemma.T5GemmaMLP": Gated(dropout="dropout"),
    "t5.modeling_t5.T5DenseGatedActDense": Gated(
        "wi_0", "wi_1", "wo", "act", "dropout", casts=True
    ),
    "lfm2.modeling_lfm2.Lfm2MLP": Gated("w1", "w3", "w2", act=None),
    "phi3.modeling_phi3.Phi3MLP": Gated("gate_up_proj", None, act="activation_fn"),
    "granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMLP": Gated(
        "input_linear", None, "output_linear", "activation"
    ),
}


def fusible(module: nn.Module) -> dict[str, int]:
    """How many parts of each type kernels would take over.

    >>> fusible(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GELU()))
    {'LayerNorm': 1, 'GELU': 1}
    """
    with remembering():
        forms = {*makers(module).values()}
        found = [x for x in module.modules() if _forward(x, forms) or _loss(x)]
    return dict(Counter(type(part).__name__ for part in found))


def fuse(module: nn.Module) -> None:
    """Let kernels take over what they can, in this very module."""
    with remembering():
        forms = {*makers(module).values()}
        for part in module.modules():
            forward, loss = _forward(part, forms), _loss(part)
            if forward is not None:
                part.__dict__["forward"] = forward
            if loss is not None:
                part.__dict__["_loss_function"] = loss
        mark_tables(module)


def known_as(part: nn.Module, specimens: Mapping[str, T]) -> T | None:
    """What is said of the specimen that a module is written like."""
    if type(part).__module__.startswith("torch.") or shadowed(part):
        return None
    for path, meaning in specimens.items():
        wanted = specimen(MODELS + path)
        if wanted is not None and same_forward(type(part), wanted):
            return meaning
    return None


def _forward(part: nn.Module, forms: set[Tables]) -> Forward | None:
    if "forward" in part.__dict__:
        return None
    rule = RULES.get(genuine(part))
    if rule is not None:
        return rule(part)
    norm, network = known_as(part, NORMS), known_as(part, NETWORKS)
    if norm is not None:
        return _rms_norm(part, norm)
    return turned_attention(part, forms) if network is None else _gated(part, network)


def _same(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether all are of one dtype: else torch's rules of promotion say what comes out."""
    return all(w is None or w.dtype == x.dtype for w in weights)


def _plain_layout(x: Tensor) -> bool:
    """Whether numbers lie one after the other: torch's elementwise functions keep other layouts."""
    return x.layout == torch.strided and not x.is_nested and x.is_contiguous()


def _of_one(plain: Forward, new: Callable[[Tensor], Any]) -> Forward:
    """A forward of one tensor; ``plain`` has its name, and says what is wrong with others."""
    name = next(iter(inspect.signature(plain).parameters), "")

    def forward(*args: Any, **named: Any) -> Any:
        x = args[0] if args else named.get(name)
        if len(args) + len(named) == 1 and isinstance(x, Tensor):
            return new(x)
        return plain(*args, **named)

    return forward


def _rms_norm(part: nn.Module, how: RMSNorm) -> Forward:
    plain, name = part.forward, how.weight
    if how.scaled is not None and not getattr(part, how.scaled):
        name = None

    def forward(x: Tensor) -> Any:
        weight, eps = None if name is None else getattr(part, name), getattr(part, how.eps)
        fits = (
            x.dim()
            and x.shape[-1]
            and numbers(x)
            # Others broadcast; an eps that is a tensor may want a gradient.
            and (name is None or (isinstance(weight, Tensor) and weight.shape == x.shape[-1:]))
            and isinstance(eps, float | int)
        )
        if not fits or not _plain_layout(x) or (how.promotes and not _same(x, weight)):
            return plain(x)
        return kernels.rms_norm(x, weight, eps, offset=how.offset)

    return _of_one(plain, forward)


def _of_rows(part: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> bool:
    """Whether torch's norm takes this for rows, and gives its dtype back: not under autocast."""
    if x.layout != torch.strided or x.is_nested or not numbers(x):
        return False
    device = x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    fits = (*x.shape[-1:],) == part.normalized_shape
    return fits and not autocast


def _torch_rms_norm(part: nn.Module) -> Forward | None:
    assert isinstance(part, nn.RMSNorm)
    if len(part.normalized_shape) != 1:
        return None
    plain = part.forward

    def forward(x: Tensor) -> Any:
        if not _of_rows(part, x) or not _plain_layout(x) or not _same(x, part.weight):
            return plain(x)
        eps = torch.finfo(wide(x)).eps if part.eps is None else part.eps
        return kernels.rms_norm(x, part.weight, eps)

    return forward


def _layer_norm(part: nn.Module) -> Forward | None:
    assert isinstance(part, nn.LayerNorm)
    if len(part.normalized_shape) != 1:
        return None
    plain = part.forward

    def forward(input: Tensor) -> Any:
        if not _of_rows(part, input) or not _same(input, part.weight, part.bias):
            return plain(input)
        return kernels.layer_norm(input, part.weight, part.bias, part.eps)

    return forward


def activation(part: nn.Module) -> str | None:
    """The activation that a module is: ``"silu"``, ``"none"`` or ``"tanh"`` (of GELU)."""
    name, inner = genuine(part), getattr(part, "act", None)
    if isinstance(part, nn.GELU):
        return part.approximate if name in RULES else None
    if name in SILU:
        return "silu"
    home, _, name = name.rpartition(".")
    if home != "transformers.activations":
        return None
    if name in ("NewGELUActivation", "FastGELUActivation"):
        return "tanh"
    if name == "GELUTanh":
        return "tanh" if getattr(inner, "func", None) is nn.functional.gelu else None
    if name == "GELUActivation":
        return "none" if inner is nn.functional.gelu else None
    return None


def _gelu(part: nn.Module) -> Forward | None:
    how = activation(part)
    if how not in ("none", "tanh"):
        return None
    plain = part.forward

    def forward(input: Tensor) -> Any:
        if not input.dim() or not numbers(input) or not _plain_layout(input):
            return plain(input)
        return kernels.bias_gelu(input, None, how)  # type: ignore[arg-type]

    return forward


def _gated(part: nn.Module, how: Gated) -> Forward | None:
    act: Any = nn.SiLU() if how.act is None else getattr(part, how.act)
    which = None if not isinstance(act, nn.Module) or watched(act) else activation(act)
    if which is None:
        return None
    plain = part.forward

    def forward(x: Tensor) -> Any:
        if x.is_nested:
            return plain(x)
        gate, down = getattr(part, how.gate)(x), getattr(part, how.down)
        gate, up = gate.chunk(2, -1) if how.up is None else (gate, getattr(part, how.up)(x))
        if not _same(gate, up) or gate.shape != up.shape or not (gate.dim() and numbers(gate)):
            y = act(gate) * up
        elif which == "silu":
            y = kernels.swiglu(gate, up)
        else:
            y = kernels.geglu(gate, up, which)  # type: ignore[arg-type]
        if how.dropout is not None:
            y = getattr(part, how.dropout)(y)
        if how.casts and isinstance(down.weight, Tensor) and down.weight.dtype != torch.int8:
            y = y.to(down.weight.dtype)
        return down(y)

    return _of_one(plain, forward)


def _residual_norm(part: nn.Module) -> Forward | None:
    """A projection, dropout, and the norm of its sum with a residual stream: BERT's."""
    norm: Any = part.LayerNorm
    if RULES.get(genuine(norm)) is not _layer_norm or watched(norm):
        return None

    def forward(hidden_states: Tensor, input_tensor: Tensor) -> Any:
        new = part.dropout(part.dense(hidden_states))  # type: ignore[operator]
        same = _same(new, input_tensor, norm.weight, norm.bias) and new.shape == input_tensor.shape
        if not same or not _of_rows(norm, new):
            return norm(new + input_tensor)
        y, _ = kernels.layer_norm(new, norm.weight, norm.bias, norm.eps, residual=input_tensor)
        return y

    return forward


def _loss(part: nn.Module) -> Forward | None:
    """In the place of the loss that a model takes from the usual functions of Hugging Face."""
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return None
    found = getattr(part, "loss_function", None)
    if found is None:
        return None
    return next((new for path, new in LOSSES.items() if found is specimen(path)), None)


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The loss of a causal language model, from logits that are not widened.

    Args:
        logits: ``[B, T, vocab_size]``.
        labels: ``[B, T]`` int64, not shifted.
        vocab_size: of the model.
        num_items_in_batch: divides the sum of losses; by default their number.
        ignore_index: a label that counts for nothing.
        shift_labels: ``[B, T]``, labels already shifted.

    Returns:
        0-d float32, also for logits in float64.
    """
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    return masked_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """The loss of a model whose labels stand where they are predicted: as :func:`causal_loss`."""
    loss = kernels.cross_entropy(
        logits.view(-1, vocab_size),
        labels.view(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    ).float()
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


LOSSES = {
    "transformers.loss.loss_utils.ForCausalLMLoss": causal_loss,
    "transformers.loss.loss_utils.ForMaskedLMLoss": masked_loss,
}
SILU = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
GELUS = ("NewGELUActivation", "FastGELUActivation", "GELUTanh", "GELUActivation")
RULES: dict[str, Callable[[nn.Module], Forward | None]] = {
    "torch.nn.modules.normalization.LayerNorm": _layer_norm,
    "torch.nn.modules.normalization.RMSNorm": _torch_rms_norm,
    "torch.nn.modules.activation.GELU": _gelu,
    **{f"transformers.activations.{name}": _gelu for name in GELUS},
    f"{MODELS}bert.modeling_bert.BertSelfOutput": _residual_norm,
    f"{MODELS}bert.modeling_bert.BertOutput": _residual_norm,
}
