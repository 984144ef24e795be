"""Kernels in the place of norms, activations, rotary positions and losses of known modules.

:func:`fuse` gives instances of known types another ``forward``; the classes, the parameters and all
else stay as they are. A type counts only as itself: what inherits from it may mean something
else and is left alone, as is a module with hooks on a part that would no longer be called.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zfunc import kernels

__all__ = ["activation", "fuse", "fusible"]

Forward = Callable[..., Any]
Rule = Callable[[nn.Module], Forward | None]

# Families of Hugging Face whose parts are written alike, by the prefix of their classes.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
}


def fusible(module: nn.Module) -> dict[str, int]:
    """How many parts of each type kernels would take over.

    >>> fusible(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.GELU()))
    {'LayerNorm': 1, 'GELU': 1}
    """
    parts = module.modules()
    found = [part for part in parts if _forward(part) is not None or _causal_loss_of(part)]
    return dict(Counter(type(part).__name__ for part in found))


def fuse(module: nn.Module) -> None:
    """Let kernels take over what they can, in this very module."""
    for part in module.modules():
        forward = _forward(part)
        if forward is not None:
            part.__dict__["forward"] = forward
        if _causal_loss_of(part):
            part.__dict__["_loss_function"] = causal_loss


def _forward(part: nn.Module) -> Forward | None:
    kind = type(part)
    rule = RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    if rule is None or "forward" in part.__dict__ or _hooked(part):
        return None
    return rule(part)


def _hooked(part: nn.Module) -> bool:
    """Whether somebody watches a child, which a fused forward may pass by."""
    return any(child._forward_hooks or child._forward_pre_hooks for child in part.children())


def _same(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether all are of one dtype: else torch's rules of promotion say what comes out."""
    return all(w is None or w.dtype == x.dtype for w in weights)


def _rms_norm(part: nn.Module) -> Forward:
    plain = part.forward

    def forward(hidden_states: Tensor) -> Any:
        weight = part.weight
        if not _same(hidden_states, weight):  # type: ignore[arg-type]
            return plain(hidden_states)
        return kernels.rms_norm(hidden_states, weight, part.variance_epsilon)  # type: ignore[arg-type]

    return forward


def _layer_norm(part: nn.Module) -> Forward | None:
    assert isinstance(part, nn.LayerNorm)
    if len(part.normalized_shape) != 1:
        return None
    plain = part.forward

    def forward(input: Tensor) -> Any:
        if not _same(input, part.weight, part.bias):
            return plain(input)
        return kernels.layer_norm(input, part.weight, part.bias, part.eps)

    return forward


def activation(part: nn.Module) -> str | None:
    """The activation that a module is: ``"silu"``, ``"none"`` or ``"tanh"`` (of GELU)."""
    name, inner = type(part).__qualname__, getattr(part, "act", None)
    if isinstance(part, nn.GELU):
        return part.approximate
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
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
    return lambda input: kernels.bias_gelu(input, None, how)  # type: ignore[arg-type]


def _gated(part: nn.Module) -> Forward | None:
    how = activation(part.act_fn)  # type: ignore[arg-type]
    if how is None:
        return None

    def forward(x: Tensor) -> Any:
        gate, up = part.gate_proj(x), part.up_proj(x)  # type: ignore[operator]
        if how == "silu":
            return part.down_proj(kernels.swiglu(gate, up))  # type: ignore[operator]
        return part.down_proj(kernels.geglu(gate, up, how))  # type: ignore[operator, arg-type]

    return forward


def _residual_norm(part: nn.Module) -> Forward | None:
    """A projection, dropout, and the norm of its sum with a residual stream: BERT's."""
    if type(part.LayerNorm) is not nn.LayerNorm:
        return None
    plain = part.forward

    def forward(hidden_states: Tensor, input_tensor: Tensor) -> Any:
        norm: Any = part.LayerNorm
        if not _same(hidden_states, input_tensor, norm.weight, norm.bias):
            return plain(hidden_states, input_tensor)
        new = part.dropout(part.dense(hidden_states))  # type: ignore[operator]
        y, _ = kernels.layer_norm(new, norm.weight, norm.bias, norm.eps, residual=input_tensor)
        return y

    return forward


def _rotary_attention(part: nn.Module) -> Forward | None:
    """Its own forward, in whose globals the rotation is a kernel; those of its module stay."""
    function = type(part).forward
    plain = getattr(function, "__globals__", {}).get("apply_rotary_pos_emb")
    code = getattr(function, "__code__", None)
    if plain is None or code is None or "apply_rotary_pos_emb" not in code.co_names:
        return None

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        half = cos.shape[-1] // 2  # the other half of the tables is the same again
        if unsqueeze_dim != 1 or q.dim() != 4 or cos.dim() != 3 or not _same(q, k):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return kernels.rotary(q, k, cos[..., :half], sin[..., :half])

    space = function.__globals__ | {"apply_rotary_pos_emb": rotated}
    fused = types.FunctionType(
        code, space, function.__name__, function.__defaults__, function.__closure__
    )
    fused.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(fused, part)


def _causal_loss_of(part: nn.Module) -> bool:
    """Whether a language model takes its loss from the usual function of Hugging Face."""
    kind = type(part)
    if f"{kind.__module__}.{kind.__qualname__}" not in LANGUAGE_MODELS:
        return False
    usual = getattr(part, "loss_function", None)
    return getattr(usual, "__name__", "") == "ForCausalLMLoss"


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
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = kernels.cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction=reduction,  # type: ignore[arg-type]
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "torch.nn.modules.normalization.LayerNorm": _layer_norm,
        "torch.nn.modules.activation.GELU": _gelu,
    }
    for name in ("NewGELUActivation", "FastGELUActivation", "GELUTanh", "GELUActivation"):
        rules[f"transformers.activations.{name}"] = _gelu
    for family, prefix in FAMILIES.items():
        where = f"transformers.models.{family}.modeling_{family}.{prefix}"
        rules |= {f"{where}RMSNorm": _rms_norm, f"{where}Attention": _rotary_attention}
        rules[f"{where}MLP"] = _gated
    for name in ("BertSelfOutput", "BertOutput"):
        rules[f"transformers.models.bert.modeling_bert.{name}"] = _residual_norm
    return rules


RULES = _rules()
LANGUAGE_MODELS = {
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel",
    *(
        f"transformers.models.{family}.modeling_{family}.{prefix}ForCausalLM"
        for family, prefix in FAMILIES.items()
        if family != "mixtral"  # adds a loss of its router
    ),
}
