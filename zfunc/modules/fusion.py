"""Kernels in the place of norms, activations, rotary positions and losses of known modules.

:func:`fuse` gives instances of known types another ``forward``; the classes, the parameters and all
else stay as they are. A type counts only as itself, with the ``forward`` that it was written with:
what inherits from it, is named like it or has been patched may mean something else and is left
alone, as is a module with hooks on a part that would no longer be called. Arguments for which a
kernel would give another dtype or another memory layout than the module take the module's own way.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zfunc import kernels

__all__ = ["activation", "fuse", "fusible", "genuine", "rotation", "watched"]

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


def genuine(part: nn.Module) -> str:
    """The full name of a module's type if it is what it is called; ``""`` if not.

    It is not where the module that it claims to come from knows another one by its name, or where
    its ``forward`` comes from somewhere else.
    """
    kind = type(part)
    home, name = kind.__module__, kind.__qualname__
    forward = (getattr(kind.forward, x, "") for x in ("__module__", "__qualname__"))
    known = getattr(sys.modules.get(home), name, None) is kind
    return f"{home}.{name}" if known and (*forward,) == (home, f"{name}.forward") else ""


def watched(part: nn.Module) -> bool:
    """Whether a module does more, when it is called, than its type says."""
    hooks = (
        *(part._forward_hooks, part._forward_pre_hooks),
        *(part._backward_hooks, part._backward_pre_hooks),
    )
    return "forward" in part.__dict__ or any(hooks)


def _forward(part: nn.Module) -> Forward | None:
    rule = RULES.get(genuine(part))
    return None if rule is None or "forward" in part.__dict__ else rule(part)


def _same(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether all are of one dtype: else torch's rules of promotion say what comes out."""
    return all(w is None or w.dtype == x.dtype for w in weights)


def _plain_layout(x: Tensor) -> bool:
    """Whether numbers lie one after the other: torch's elementwise functions keep other layouts."""
    return x.layout == torch.strided and not x.is_nested and x.is_contiguous()


def _rms_norm(part: nn.Module) -> Forward:
    plain = part.forward

    def forward(hidden_states: Tensor) -> Any:
        weight = part.weight
        if not _same(hidden_states, weight) or not _plain_layout(hidden_states):  # type: ignore[arg-type]
            return plain(hidden_states)
        return kernels.rms_norm(hidden_states, weight, part.variance_epsilon)  # type: ignore[arg-type]

    return forward


def _layer_norm(part: nn.Module) -> Forward | None:
    assert isinstance(part, nn.LayerNorm)
    if len(part.normalized_shape) != 1:
        return None
    plain = part.forward

    def forward(input: Tensor) -> Any:
        strided = input.layout == torch.strided and not input.is_nested
        wide = torch.is_autocast_enabled(input.device.type)  # may give float32 whatever comes
        if wide or not strided or not _same(input, part.weight, part.bias):
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
        if not input.dim() or not _plain_layout(input):
            return plain(input)
        return kernels.bias_gelu(input, None, how)  # type: ignore[arg-type]

    return forward


def _gated(part: nn.Module) -> Forward | None:
    act: Any = part.act_fn
    how = None if watched(act) else activation(act)
    if how is None:
        return None
    plain = part.forward

    def forward(x: Tensor) -> Any:
        if x.is_nested:
            return plain(x)
        gate, up = part.gate_proj(x), part.up_proj(x)  # type: ignore[operator]
        if how == "silu":
            return part.down_proj(kernels.swiglu(gate, up))  # type: ignore[operator]
        return part.down_proj(kernels.geglu(gate, up, how))  # type: ignore[operator, arg-type]

    return forward


def _residual_norm(part: nn.Module) -> Forward | None:
    """A projection, dropout, and the norm of its sum with a residual stream: BERT's."""
    norm: Any = part.LayerNorm
    if RULES.get(genuine(norm)) is not _layer_norm or watched(norm):
        return None
    plain = part.forward

    def forward(hidden_states: Tensor, input_tensor: Tensor) -> Any:
        wide = torch.is_autocast_enabled(hidden_states.device.type)
        if wide or not _same(hidden_states, input_tensor, norm.weight, norm.bias):
            return plain(hidden_states, input_tensor)
        new = part.dropout(part.dense(hidden_states))  # type: ignore[operator]
        y, _ = kernels.layer_norm(new, norm.weight, norm.bias, norm.eps, residual=input_tensor)
        return y

    return forward


def rotation(part: nn.Module) -> Forward | None:
    """The function by which an attention turns heads; None if it is not its module's own."""
    space = getattr(inspect.unwrap(type(part).forward), "__globals__", {})
    found: Forward | None = space.get("apply_rotary_pos_emb")
    return found if getattr(found, "__module__", "") == type(part).__module__ else None


def _rotary_attention(part: nn.Module) -> Forward | None:
    """Its own forward, in whose globals the rotation is a kernel; those of its module stay."""
    function, plain = type(part).forward, rotation(part)
    code = getattr(function, "__code__", None)
    if plain is None or code is None or "apply_rotary_pos_emb" not in code.co_names:
        return None

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        half = cos.shape[-1] // 2  # the other half of the tables is the same again
        fits = unsqueeze_dim == 1 and q.dim() == 4 and cos.dim() == 3 and _same(q, k, cos, sin)
        if not fits or cos.requires_grad or sin.requires_grad:
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
    usual = getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    return usual is not None and getattr(part, "loss_function", None) is usual


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
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = kernels.cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction=reduction,  # type: ignore[arg-type]
    ).float()
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


SILU = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")


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
