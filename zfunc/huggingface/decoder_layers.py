"""A token through a decoder layer of a known type, in as few operations as it takes.

Decoding a token, what a layer's modules do around its products takes time that the products of a
small model cannot hide: calls of modules, and operations on a few numbers each. :func:`fuse` gives
layers that are written like those of Llama, Mistral, Qwen2 or Qwen3 another ``forward`` for one
token of each text, which does the same to the same parameters; for all else (more tokens,
gradients, training, attention that is not torch's) it is the layer's own. Where the dispatch has
kernels for blocks of the layer (:mod:`zfunc.huggingface.blocks`), they take it, and torch attends
in between. A layer with hooks anywhere in it is left alone.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zfunc import kernels
from zfunc.huggingface import blocks
from zfunc.huggingface.blocks import Slots
from zfunc.huggingface.fusion import NETWORKS, NORMS, Gated, RMSNorm, activation, known_as
from zfunc.huggingface.likeness import genuine, remembering, specimen, watched
from zfunc.huggingface.rotations import Rotation, mark_tables, rotated_by, said_of
from zfunc.quant.kernel_products import readable
from zfunc.quant.products import several
from zfunc.quant.qtensor import QTensor

__all__ = ["fuse", "known"]

FAMILIES = [  # and whether heads have norms of their own
    ("llama.modeling_llama.Llama", False),
    ("mistral.modeling_mistral.Mistral", False),
    ("qwen2.modeling_qwen2.Qwen2", False),
    ("qwen3.modeling_qwen3.Qwen3", True),
]
LAYERS = {f"{family}DecoderLayer": True for family, _ in FAMILIES}
ATTENTIONS = {f"{family}Attention": norms for family, norms in FAMILIES}
ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs")
LINEAR = "torch.nn.modules.linear.Linear"
SDPA = "transformers.integrations.sdpa_attention.sdpa_attention_forward"


def known(module: nn.Module) -> int:
    """How many layers of a module :func:`fuse` would give another ``forward``."""
    with remembering():
        return sum(_layer(part) is not None for part in module.modules())


def fuse(module: nn.Module) -> None:
    """Let layers of known types take single tokens in few operations, in this very module."""
    with remembering():
        for part in module.modules():
            layer = _layer(part)
            if layer is not None:
                part.__dict__["forward"] = functools.partial(_forward, layer, part, part.forward)
        mark_tables(module)


@dataclass(frozen=True)
class DecoderLayer:
    """What a layer is made of. Each ``Slots`` holds a submodule's parameters of the moment.

    Attributes:
        index: which layer of the cache is its own.
        width: features of a head.
        scale: of the scores.
        act: ``"silu"``, or of a GELU ``"none"`` or ``"tanh"``.
        norms: the weights before attention and before the feed-forward network, and their eps.
        q, k, v, o, gate, up, down: of the products.
        q_norm, k_norm: of the norms of heads, and their eps; None where there are none.
    """

    index: int
    width: int
    scale: float
    act: str
    norms: tuple[tuple[Slots, float], tuple[Slots, float]]
    q: Slots
    k: Slots
    v: Slots
    o: Slots
    gate: Slots
    up: Slots
    down: Slots
    q_norm: tuple[Slots, float] | None
    k_norm: tuple[Slots, float] | None


def _layer(part: nn.Module) -> DecoderLayer | None:
    if not known_as(part, LAYERS):
        return None
    attention: Any = part.self_attn
    mlp: Any = part.mlp
    heads = known_as(attention, ATTENTIONS)
    if heads is None or known_as(mlp, NETWORKS) != Gated():
        return None
    norms: list[Any] = [part.input_layernorm, part.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if heads else []
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    how = activation(mlp.act_fn)
    own = inspect.signature(_forward).parameters
    if (
        how is None
        or any(watched(x) for x in part.modules())
        # They are called by names, and may be written alike with others.
        or (*inspect.signature(part.forward).parameters,) != (*own,)[3:]
        or (*inspect.signature(attention.forward).parameters,) != ARGUMENTS
        or any(known_as(x, NORMS) != RMSNorm(promotes=True) for x in norms)
        or any(genuine(x) != LINEAR for x in linears)
        or any("weight" not in x._parameters for x in (*norms, *linears))
        or any("bias" not in x._parameters for x in linears)
        or rotated_by(attention) != Rotation()
        or getattr(attention.config, "_attn_implementation", "") != "sdpa"
        or not _torch_attends(attention)
    ):
        return None
    widths = [linears[0].in_features] * 2 + [attention.head_dim] * 2
    for norm, width in zip(norms, widths, strict=False):
        # Other weights are broadcast, and an eps that is a tensor may be any.
        if norm.weight is None or norm.weight.shape != (width,):
            return None
        if not isinstance(norm.variance_epsilon, float | int):
            return None
    first, second, *of_heads = [(x._parameters, x.variance_epsilon) for x in norms]
    return DecoderLayer(
        attention.layer_idx,
        attention.head_dim,
        attention.scaling,
        how,
        (first, second),
        *(x._parameters for x in linears),
        *(of_heads or (None, None)),
    )


def _torch_attends(attention: Any) -> bool:
    """Whether what is registered as ``"sdpa"`` where an attention looks is Hugging Face's own."""
    functions = inspect.unwrap(type(attention).forward).__globals__["ALL_ATTENTION_FUNCTIONS"]
    found: Any = functions["sdpa"]
    return found is specimen(SDPA)


def _forward(
    layer: DecoderLayer,
    part: nn.Module,
    plain: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    x, mask = hidden_states, attention_mask
    if (
        x.shape[1] != 1
        or past_key_values is None
        or position_embeddings is None
        or part.training
        or torch.is_grad_enabled()
        or x.dtype != layer.norms[0][0]["weight"].dtype
        or not (mask is None or (isinstance(mask, Tensor) and mask.shape[1:3] == (1, 1)))
        or any(value is not None and value is not False for value in kwargs.values())
    ):
        return plain(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
    # In a rehearsal of stages, where shapes go through, each layer makes its own: the stage that
    # has the first one may not have those behind it.
    cos, sin = position_embeddings
    turn = _turn(past_key_values, cos, sin) if type(x) is Tensor else _new_turn(cos, sin)
    return _token(layer, x[:, 0], mask, past_key_values, turn)[:, None]


def _token(layer: DecoderLayer, x: Tensor, mask: Tensor | None, cache: Any, turn: Turn) -> Tensor:
    """``[b, w]``: a token of each text through the layer."""
    q, keys, values = _heads(layer, x, cache, turn)
    b, groups = keys.shape[:2]
    # Queries that share keys are rows of one product; the mask says the same to all of them.
    q = q.reshape(b, groups, -1, layer.width)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=layer.scale)
    x = blocks.added(x, y.reshape(b, -1), layer.o)
    return blocks.added(x, _hidden(layer, x), layer.down)


def _heads(layer: DecoderLayer, x: Tensor, cache: Any, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[b, heads, d]``, rotated, and all keys and values, with those of this token."""
    own = cache.layers[layer.index]
    rows = (layer.q, layer.k, layer.v)
    direct = hasattr(own, "slots") and own.is_initialized
    if layer.q_norm is None and direct and turn.halves and len(turn.rows) == len(x):
        weights = blocks.packed("norm_qkv_rope", x, rows, half=layer.width // 2)
        if weights is not None:
            norm, eps = layer.norms[0]
            where = (turn.halves[0], turn.halves[1], turn.rows, own.keys, own.values)
            how: Any = {"slots": own.slots(turn.rows), "bias": blocks.bias(rows), "eps": eps}
            q = kernels.norm_qkv_rope(x, norm["weight"], weights, *where, **how)
            return q, *own.written()
    h = _norm(x, layer.norms[0])
    q, k, v = (y.view(len(x), -1, layer.width) for y in products(h, rows))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm), _norm(k, layer.k_norm)
    both = torch.cat([q, k], dim=1)
    # (a, b) -> (a cos - b sin, b cos + a sin): the halves change places, and the first its sign.
    turned = torch.addcmul(both * turn.cos, both.roll(layer.width // 2, dims=-1), turn.sin)
    k = turned[:, q.shape[1] :, None]
    return turned[:, : q.shape[1]], *cache.update(k, v[:, :, None], layer.index)


def _hidden(layer: DecoderLayer, x: Tensor) -> Tensor:
    """``act(n(x) W_gate^T) * (n(x) W_up^T)``."""
    norm, eps = layer.norms[1]
    halves = (layer.gate, layer.up)
    if blocks.bias(halves) is None:
        weights = blocks.packed("norm_gate_up", x, halves)
        if weights is not None:
            act = blocks.ACTIVATIONS[layer.act]
            return kernels.norm_gate_up(x, norm["weight"], weights, activation=act, eps=eps)
    gate, up = products(_norm(x, layer.norms[1]), halves)
    gate = F.silu(gate) if layer.act == "silu" else F.gelu(gate, approximate=layer.act)
    return gate.mul_(up)


def products(x: Tensor, slots: tuple[Slots, ...]) -> list[Tensor]:
    """Products of one input with several matrices."""
    if all(type(p["weight"]) is QTensor and readable(p["weight"]) for p in slots):
        found = several(x, [p["weight"] for p in slots])
        pairs = zip(found, slots, strict=True)
        return [y if p["bias"] is None else y + p["bias"] for y, p in pairs]
    return [F.linear(x, p["weight"], p["bias"]) for p in slots]


@dataclass(frozen=True)
class Turn:
    """By which angles the heads of a token turn, the same in all layers.

    Attributes:
        cos: ``[b, 1, d]``, as the model gives it.
        sin: likewise, with the sign that it has for each half.
        halves: half of both, ``[b, d / 2]`` float32, as kernels read them; None unless both halves
            are known to be the same.
        rows: ``[b]``, which row of them a text has.
    """

    cos: Tensor
    sin: Tensor
    halves: tuple[Tensor, Tensor] | None
    rows: Tensor


def _turn(cache: Any, cos: Tensor, sin: Tensor) -> Turn:
    """Made in the first layer of a step, and kept with the step's cache for the others."""
    made = cache.__dict__.get("_zfunc_turn")
    if made is not None and made[0] is cos and made[1] is sin:
        return made[2]
    turn = _new_turn(cos, sin)
    cache.__dict__["_zfunc_turn"] = cos, sin, turn
    return turn


def _new_turn(cos: Tensor, sin: Tensor) -> Turn:
    half, known = cos.shape[-1] // 2, said_of(cos) == said_of(sin) == "halves"
    return Turn(
        cos,
        sin * _signs(cos.shape[-1], sin.dtype, sin.device),
        (cos[:, 0, :half].float(), sin[:, 0, :half].float()) if known else None,
        torch.arange(len(cos), device=cos.device),
    )


@functools.cache
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        ones = torch.ones(width // 2, dtype=dtype, device=device)
        return torch.cat([-ones, ones])


def _norm(x: Tensor, how: tuple[Slots, float]) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], how[0]["weight"], how[1])
