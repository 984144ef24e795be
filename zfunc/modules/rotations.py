"""Rotary positions of Hugging Face's attentions, turned by a kernel.

An attention calls the ``apply_rotary_pos_emb`` of its module. Where that is written like one whose
meaning is known, the attention's own ``forward`` runs with the kernel under this name; the module's
stays. The kernel reads a cosine and a sine for each pair of features, the model's tables have them
twice; how they are laid out is told by what makes them, the rotary embeddings of the same model.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from zfunc import kernels
from zfunc.kernels.operators import numbers
from zfunc.modules.likeness import MODELS, alike, same_forward, shadowed, specimen, watched

__all__ = ["Rotation", "Tables", "rotated_by", "tables_of", "turned_attention"]

NAME = "apply_rotary_pos_emb"
Tables = Literal["halves", "neighbours", "once"]


@dataclass(frozen=True)
class Rotation:
    """How a function turns heads.

    Attributes:
        layout: which features are a pair.
        tables: where the two cosines of a pair are: in the two halves of a row, side by side, or
            one and the same. None where the function itself takes the first half.
        whole: the tables are as wide as a head.
        casts: the result has the dtype that came in, whatever that of the tables.
    """

    layout: Literal["half", "interleaved"] = "half"
    tables: Tables | None = "halves"
    whole: bool = True
    casts: bool = False


ROTATIONS = {
    "llama.modeling_llama": Rotation(),
    "gpt_neox.modeling_gpt_neox": Rotation(whole=False),
    "nemotron.modeling_nemotron": Rotation(whole=False),
    "phi3.modeling_phi3": Rotation(whole=False),
    "olmo.modeling_olmo": Rotation(casts=True),
    "cohere.modeling_cohere": Rotation("interleaved", "neighbours", casts=True),
    "ernie4_5.modeling_ernie4_5": Rotation("interleaved", None, casts=True),
    "helium.modeling_helium": Rotation("interleaved", None),
    "gpt_oss.modeling_gpt_oss": Rotation(tables="once"),
    "glm.modeling_glm": Rotation("interleaved", None, whole=False),
}
TABLES: dict[str, Tables] = {
    "llama.modeling_llama.LlamaRotaryEmbedding": "halves",
    "gemma3.modeling_gemma3.Gemma3RotaryEmbedding": "halves",
    "olmo.modeling_olmo.OlmoRotaryEmbedding": "halves",
    "olmo3.modeling_olmo3.Olmo3RotaryEmbedding": "halves",
    "cohere.modeling_cohere.CohereRotaryEmbedding": "neighbours",
    "gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding": "once",
}


def tables_of(module: nn.Module) -> Tables | None:
    """The form of all tables of a model; None if there are none, several or unknown ones."""
    makers = [part for part in module.modules() if _makes_tables(type(part).__name__)]
    forms = {_form(kind) for kind in {type(part) for part in makers}}
    if any(watched(part) or shadowed(part) for part in makers):
        return None
    return forms.pop() if len(forms) == 1 else None


def rotated_by(part: nn.Module) -> Rotation | None:
    """How an attention turns heads; None if there is no telling."""
    function = inspect.unwrap(type(part).forward)
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    turn = inspect.unwrap(space[NAME]) if callable(space.get(NAME)) else None
    arguments = getattr(turn, "__code__", None)
    if code is None or NAME not in code.co_names or arguments is None:
        return None
    if arguments.co_varnames[:4] != ("q", "k", "cos", "sin"):
        return None
    for home, rotation in ROTATIONS.items():
        wanted = specimen(f"{MODELS}{home}.{NAME}")
        if wanted is not None and alike(space.get(NAME), wanted):
            return rotation
    return None


def turned_attention(part: nn.Module, tables: Tables | None) -> Callable[..., Any] | None:
    """An attention's own forward, in whose globals the rotation is a kernel.

    Args:
        part: the attention.
        tables: the form of its model's tables.
    """
    rotation, function = rotated_by(part), type(part).forward
    if rotation is None or rotation.tables not in (None, tables):
        return None
    if hasattr(function, "__wrapped__"):
        return None  # what decorates it may do more
    turn = _turn(rotation, function.__globals__[NAME])
    fused = types.FunctionType(
        function.__code__,
        function.__globals__ | {NAME: turn},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    fused.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(fused, part)


def _turn(rotation: Rotation, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with the arguments of a rotation, which it leaves what it is not made for."""
    copies = 2 if rotation.tables == "once" else 1

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        width, heads = cos.shape[-1] * copies, q.shape[-1]
        if (
            rest
            or named  # another dimension of heads, or positions
            or not (q.dim() == k.dim() == 4 and cos.dim() == 3)
            or not (q.shape[0] == k.shape[0] and cos.shape[0] in (1, q.shape[0]))
            or not (q.shape[2:] == k.shape[2:] and cos.shape == sin.shape)
            or q.shape[2] != cos.shape[1]
            or not (width == heads or (width < heads and not rotation.whole))
            or width % 2
            or not numbers(q, cos, sin)
            or not (q.dtype == k.dtype and (rotation.casts or cos.dtype == sin.dtype == q.dtype))
            or cos.requires_grad
            or sin.requires_grad
        ):
            return plain(q, k, cos, sin, *rest, **named)
        one = slice(0, None, 2) if rotation.tables == "neighbours" else slice(width // 2)
        return kernels.rotary(q, k, cos[..., one], sin[..., one], rotation.layout)

    return rotated


def _makes_tables(name: str) -> bool:
    return "Rotary" in name or "Rope" in name


def _form(kind: type) -> Tables | None:
    for path, form in TABLES.items():
        wanted = specimen(MODELS + path)
        if wanted is not None and same_forward(kind, wanted):
            return form
    return None
