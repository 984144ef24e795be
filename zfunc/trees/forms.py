"""How trees are shown: shapes and dtypes instead of numbers, on a screenful.

``f32[64,32]`` stands for a tensor. Layers of one form are shown once, and a tree that has more
lines than fit is cut with ``... N more``.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.trees.marks import spent
from zfunc.trees.nodes import NAMESPACE, Box, Lazy, Placed

__all__ = ["Shown", "as_html", "as_text", "fields", "form", "short"]

LINES = 40  # of a text
WIDEST = 64  # children of a node that are shown at most
CONTAINERS = (dict, list, tuple)
PREFIXES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


@dataclass(frozen=True)
class Shown:
    """A node as it is shown.

    Attributes:
        head: a leaf's shape and dtype, or what kind of node it is.
        parts: names and forms of its children.
    """

    head: str
    parts: tuple[tuple[str, Shown], ...] = ()


def short(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A dtype and a shape in the short form of JAX.

    >>> short(torch.float32, (64, 32)), short(torch.bfloat16, ()), short(torch.bool, (3,))
    ('f32[64,32]', 'bf16[]', 'bool[3]')
    """
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    if letters in PREFIXES:
        name = PREFIXES[letters] + name.removeprefix(letters)
    return f"{name}[{','.join(map(str, shape))}]"


def form(node: Any) -> Shown:
    """What is shown of a tree; nothing is computed, gathered or waited for.

    >>> form({"w": torch.zeros(2, 3), "n": None}).parts
    (('n', Shown(head='None', parts=())), ('w', Shown(head='f32[2,3]', parts=())))
    """
    if isinstance(node, Tensor):
        return Shown(_leaf(node))
    if isinstance(node, Lazy):
        return Shown(f"{type(node).__name__}, not computed yet")
    if isinstance(node, Placed | Box):
        return _placed(node)
    if isinstance(node, Shown):
        return node
    if optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
        text = repr(node)
        return Shown(text if len(text) <= 60 and "\n" not in text else type(node).__name__)
    children, _, entries, _ = optree.tree_flatten_one_level(
        node, none_is_leaf=True, namespace=NAMESPACE
    )
    name = "" if type(node) in CONTAINERS else type(node).__name__
    if not children:
        return Shown(f"{name}()" if name else repr(node))
    names = getattr(node, "_fields", entries)  # of a named tuple
    named = [(str(key), form(x)) for key, x in zip(names, children, strict=True)]
    numbered = all(isinstance(key, int) for key in names)
    return Shown(name, _alike(named) if numbered else tuple(named))


def fields(state: Any, names: Sequence[str]) -> Shown:
    """A state by its fields, the parameters first; what has their leaves is not told again."""
    parts = [(name, form(getattr(state, name))) for name in names]
    like = parts[0][1].parts
    parts[1:] = [(name, _likened(part, like)) for name, part in parts[1:]]
    frozen = getattr(state, "frozen", ())
    more = [("frozen", Shown(f"{len(frozen)} leaves"))] if frozen else []
    return Shown(type(state).__name__, (*parts, *more))


def _likened(node: Shown, like: Sequence[tuple[str, Shown]]) -> Shown:
    if like and node.parts == like:
        return Shown(f"{node.head} as params".strip())
    return replace(node, parts=tuple((name, _likened(x, like)) for name, x in node.parts))


def _placed(node: Any) -> Shown:
    """A node that knows its leaves without making them."""
    name = type(node).__name__
    if any(spent(x) for x in node.held()):
        return Shown(f"{name}(donated)")
    known = getattr(type(node), "forms", None)
    if known is None:
        return Shown(name)
    inner = form(known(node))
    head = repr(node) if isinstance(node, Placed) else name
    return replace(inner, head=head if inner.parts else f"{head} {inner.head}")


def _leaf(x: Tensor) -> str:
    if spent(x):
        return "donated"
    text = short(x.dtype, x.shape)
    if type(x) not in (Tensor, torch.nn.Parameter):
        text = f"{type(x).__name__} {text}"
    if x.device.type != "cpu":
        return f"{text} {x.device}"
    number = x.ndim == 0 and not x.is_floating_point() and x.layout is torch.strided
    return f"{text} {x.item()}" if number and type(x) is Tensor else text


def _alike(parts: Sequence[tuple[str, Shown]]) -> tuple[tuple[str, Shown], ...]:
    """Layers of one form that follow each other, as one."""
    out: list[tuple[str, str, Shown]] = []
    for name, part in parts:
        if out and part.parts and out[-1][2] == part:
            out[-1] = (out[-1][0], name, part)
        else:
            out.append((name, name, part))
    return tuple((a if a == b else f"{a}..{b}", part) for a, b, part in out)


def as_text(whole: Shown, lines: int = LINES) -> str:
    """A line for each node, with as many children of each as fit on ``lines``.

    >>> print(as_text(form({"a": [torch.zeros(2), torch.zeros(3)], "b": 1})))
    a:
      0: f32[2]
      1: f32[3]
    b: 1
    """
    width, text = WIDEST, _lines("", whole, WIDEST)
    while len(text) > lines and width > 1:
        width //= 2
        text = _lines("", whole, width)
    if len(text) > lines:
        text = [*text[: lines - 1], f"... {len(text) - lines + 1} more"]
    return "\n".join(text)


def _lines(name: str, node: Shown, width: int) -> list[str]:
    head = [f"{name}: {node.head}".rstrip() if name else node.head] if name or node.head else []
    inner = [x for key, part in node.parts[:width] for x in _lines(key, part, width)]
    if len(node.parts) > width:
        inner.append(f"... {len(node.parts) - width} more")
    return [*head, *(f"  {x}" if head else x for x in inner)]


def as_html(whole: Shown) -> str:
    """The same for a notebook: branches unfold, and only the first levels are open."""
    return f'<div style="font-family: monospace">{_unfolding("", whole, 2)}</div>'


def _unfolding(name: str, node: Shown, levels: int) -> str:
    title = html.escape(f"{name}: {node.head}".rstrip() if name else node.head)
    if not node.parts:
        return f"<div>{title}</div>"
    inner = [_unfolding(key, part, levels - 1) for key, part in node.parts[:WIDEST]]
    if len(node.parts) > WIDEST:
        inner.append(f"<div>... {len(node.parts) - WIDEST} more</div>")
    return (
        f"<details{' open' * (levels > 0)}><summary>{title}</summary>"
        f'<div style="margin-left: 2em">{"".join(inner)}</div></details>'
    )
