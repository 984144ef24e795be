"""Rotary positions of Hugging Face's attentions, turned by a kernel.

An attention calls the ``apply_rotary_pos_emb`` of its module. Where that is written like one whose
meaning is known, the attention's own ``forward`` runs with the kernel under this name; the module's
stays. The kernel reads a cosine and a sine for each pair of features, the model's tables have them
twice; what makes them, if it is known, says of each how it is laid out. Tables that come otherwise,
or were changed on their way, take the module's own function. So does what ``torch.compile`` traces,
which cannot read what a tensor says of itself, nor look up a name in globals that are no module's.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zfunc import kernels
from zfunc.huggingface.likeness import (
    MODELS,
    alike,
    remembered,
    same_forward,
    shadowed,
    specimen,
    watched,
)
from zfunc.kernels.operators import numbers

__all__ = [
    "Rotation",
    "Tables",
    "makers",
    "mark_tables",
    "rotated_by",
    "said_of",
    "turned_attention",
]

MARK = "_zfunc_form"
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


def makers(module: nn.Module) -> dict[nn.Module, Tables]:
    """The parts that make tables of a known form, whether they say so already or not."""
    own = [x for x in module.modules() if _says(x) or not shadowed(x)]
    parts = {x: _form(type(x)) for x in own}
    return {part: form for part, form in parts.items() if form is not None}


def mark_tables(module: nn.Module) -> None:
    """Let those parts say of each table of what form it is, in this very module."""
    for part, form in makers(module).items():
        if not watched(part):
            part.__dict__["forward"] = functools.partial(_marked, part.forward, form)


def _says(part: nn.Module) -> bool:
    return getattr(part.__dict__.get("forward"), "func", None) is _marked


def said_of(table: Tensor) -> Tables | None:
    """What form a table has, as its maker says; None if nobody does or it was changed since."""
    form, version = getattr(table, MARK, (None, None))
    found: Tables | None = form if version == _version(table) else None
    return found


def _marked(plain: Callable[..., Any], form: Tables, *args: Any, **named: Any) -> Any:
    tables = plain(*args, **named)
    for table in () if torch.compiler.is_compiling() else tables:
        setattr(table, MARK, (form, _version(table)))
    return tables


def _version(x: Tensor) -> int:
    """How often it was written to."""
    return 0 if x.is_inference() else x._version


def rotated_by(part: nn.Module) -> Rotation | None:
    """How an attention turns heads; None if there is no telling."""
    return _rotation(type(part))


@remembered
def _rotation(kind: type) -> Rotation | None:
    function = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
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


def turned_attention(part: nn.Module, forms: set[Tables]) -> Callable[..., Any] | None:
    """An attention's own forward, in whose globals the rotation is a kernel.

    Args:
        part: the attention.
        forms: of the tables that its model's parts make.
    """
    rotation, function = rotated_by(part), type(part).forward
    if rotation is None or rotation.tables not in (None, *forms):
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
    own, turned = types.MethodType(function, part), types.MethodType(fused, part)

    @functools.wraps(own)
    def forward(*args: Any, **named: Any) -> Any:
        return (own if torch.compiler.is_compiling() else turned)(*args, **named)

    return forward


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
            or (rotation.tables and not said_of(cos) == said_of(sin) == rotation.tables)
        ):
            return plain(q, k, cos, sin, *rest, **named)
        one = slice(0, None, 2) if rotation.tables == "neighbours" else slice(width // 2)
        return kernels.rotary(q, k, cos[..., one], sin[..., one], rotation.layout)

    return rotated


def _form(kind: type) -> Tables | None:
    for path, form in TABLES.items():
        wanted = specimen(MODELS + path)
        if wanted is not None and same_forward(kind, wanted):
            return form
    return None
