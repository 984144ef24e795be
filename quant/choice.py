"""Which leaves of a params tree are quantised.

By default the 2-D weights of linear layers: as the modules say, where the tree belongs to a
functionalized module, and else by the leaves' names, which tell embeddings from the rest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional

__all__ = [
    "Include",
    "accepts",
    "check_met",
    "fixed",
    "linear_weights",
    "looks_embedded",
    "module_of",
    "transposed_names",
]

Include = Callable[[str], bool] | str | Iterable[str] | None

# Parts of names under which tables are found that are looked up and not multiplied with.
_TABLES = re.compile(
    r"(^|[._])(embed\w*|emb|\w+_emb|\w*embeddings?|wte|wpe|lookup|pos|positions?|"
    r"token_types?|shared|relative_attention_bias)([._]|$)"
)


def looks_embedded(path: str) -> bool:
    """Whether a leaf's name is that of an embedding table.

    >>> [looks_embedded(p) for p in ("model.embed_tokens.weight", "wte", "blocks.0.qkv")]
    [True, True, False]
    """
    return _TABLES.search(path) is not None


def linear_weights(model: Functional) -> dict[str, bool]:
    """The weights of a module's linear layers by name, and whether each is stored as ``[k, n]``.

    A weight that an embedding shares is left out.
    """
    modules = dict(model._pool.skeleton.named_modules())
    found: dict[str, bool] = {}
    for leaf in model._pool.anatomy.leaves:
        homes = [(modules[home], attribute) for home, attribute in leaf.homes]
        turned = {_transposed(module) for module, attribute in homes if attribute == "weight"}
        alone = all(attribute == "weight" for _, attribute in homes)
        if turned in ({True}, {False}) and len(leaf.shape) == 2 and alone:
            found[leaf.name] = True in turned
    return found


def _transposed(module: nn.Module) -> bool | None:
    """Whether a linear layer stores its weight as ``[k, n]``; None for other modules."""
    if isinstance(module, nn.Linear):
        return False
    # Transformers' Conv1D is a linear layer with its weight the other way round (GPT-2).
    return True if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def module_of(fn: Callable[..., object]) -> Functional | None:
    """The functionalized module of which a function, perhaps wrapped, is the ``apply``."""
    owner = getattr(getattr(fn, "fn", fn), "__self__", None)
    return owner if isinstance(owner, Functional) else None


def transposed_names(model: Functional | None) -> frozenset[str]:
    """Names of the weights that a module stores as ``[k, n]``."""
    if model is None:
        return frozenset()
    return frozenset(name for name, turned in linear_weights(model).items() if turned)


def accepts(include: Include, model: Functional | None = None) -> Callable[[str, int], bool]:
    """``(path, number of dimensions) -> bool``: whether a leaf is to be quantised.

    Args:
        include: patterns of dotted paths (``"layers.*.mlp.*"``), a predicate on them, or
            None for the default.
        model: the module that the tree belongs to, if it is known.
    """
    if include is None:
        if model is not None:
            known = linear_weights(model)
            return lambda path, ndim: path in known
        return lambda path, ndim: ndim == 2 and not looks_embedded(path)
    if callable(include):
        wanted = include
        return lambda path, ndim: ndim >= 2 and bool(wanted(path))
    patterns = [include] if isinstance(include, str) else list(include)
    return lambda path, ndim: ndim >= 2 and any(fnmatchcase(path, p) for p in patterns)


def fixed(include: Include) -> Include:
    """The same choice as a value that can be compared, kept and used again."""
    if include is None or callable(include) or isinstance(include, str):
        return include
    return tuple(include)


def check_met(include: Include, leaves: Mapping[str, int], chosen: Sequence[str]) -> None:
    """Raise if an ``include`` pattern, or all of it, fits no leaf that could be quantised.

    Args:
        leaves: number of dimensions of each floating-point leaf, by its path.
        chosen: the paths that ``include`` accepts.

    Raises:
        PlacementError: with the closest paths.
    """
    able = [path for path, ndim in leaves.items() if ndim >= 2]
    if include is None or callable(include):
        if not chosen:
            raise PlacementError(
                "nothing to quantise: "
                + ("`include` accepts none of" if include else "no linear weight among")
                + f" {', '.join(able[:5]) or 'leaves of which none has two dimensions'}"
                + (" ..." if len(able) > 5 else "")
                + '. Name them: include="blocks.*".'
            )
        return
    for pattern in [include] if isinstance(include, str) else include:
        if not any(fnmatchcase(path, pattern) for path in able):
            close = difflib.get_close_matches(pattern, able, n=3, cutoff=0.0)
            flat = [p for p in leaves if p not in able and fnmatchcase(p, pattern)]
            what = f"only {flat[0]}, which has fewer than two dimensions" if flat else "no leaf"
            raise PlacementError(
                f"include={pattern!r} fits {what}. The closest paths are "
                f"{', '.join(close) or '(none)'}."
            )
