"""Low-bit parameters in a safetensors file: codes, scales and zero points as they are.

A leaf ``name`` is stored as ``name.codes``, ``name.scale`` and, if its grid is asymmetric,
``name.zero``; the file's header says in JSON, under ``zfunc.quant``, which leaves these are, in
which format, and the checksum of each. Other leaves are plain tensors under their names.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from zfunc.errors import CheckpointError, PlacementError
from zfunc.files.chunks import check_name
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor
from zfunc.trees.nodes import NAMESPACE, Tree
from zfunc.trees.tree import dotted, flatten_names

__all__ = ["is_low_bit", "load", "save", "stored_bits"]

PathLike = str | os.PathLike[str]
HEADER = "zfunc.quant"
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16,
                                                      torch.bfloat16, torch.float64)}  # fmt: skip


def save(path: PathLike, params: Tree) -> Path:
    """Write a tree of parameters, quantised or not, to one safetensors file.

    Args:
        path: the file; it is written beside and moved into place when it is complete.
        params: a plain tree; its dotted paths are the names, tied leaves are stored once.

    Returns:
        The file.

    Raises:
        CheckpointError: a name that such a file cannot have, or one that two leaves would need.
    """
    from safetensors.torch import save_file

    file, tensors, header = Path(path), {}, {}
    _told_apart(file, params)
    leaves = flatten_names(params)
    for name, leaf in leaves.items():
        if not isinstance(leaf, QTensor):
            tensors[name] = leaf.detach().contiguous()
            continue
        parts = {"codes": leaf.data_codes, "scale": leaf.scale.contiguous(), "zero": leaf.zero}
        held = {part: x for part, x in parts.items() if x is not None}
        for taken in (f"{name}.{part}" for part in held):
            if not isinstance(leaves.get(taken, leaf), QTensor):  # else it is stored in parts, too
                raise CheckpointError(
                    f"{file}: {name} is quantised, and would be stored in parts of which one is "
                    f"called {taken}, like another leaf of the tree. Rename {taken}, or leave "
                    f"{name} unquantised by `include`."
                )
        tensors.update({f"{name}.{part}": x for part, x in held.items()})
        header[name] = {
            "bits": leaf.format.bits,
            "group_size": leaf.format.group_size,
            "symmetric": leaf.format.symmetric,
            "dynamic": leaf.format.dynamic,
            "transposed": leaf.transposed,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "crc32": {part: _checksum(x) for part, x in held.items()},
        }
    for name in tensors:
        check_name(name)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(tensors, draft, metadata={"format": "pt", HEADER: json.dumps(header)})
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return file


def _told_apart(file: Path, params: Tree) -> None:
    """Refuse a tree in which two leaves have the same dotted name."""
    met: dict[str, tuple[Any, ...]] = {}
    for path in optree.tree_paths(params, namespace=NAMESPACE):
        other = met.setdefault(dotted(*path), path)
        if other is not path:
            raise CheckpointError(
                f"{file}: the leaves at {list(other)} and at {list(path)} would both be called "
                f"{dotted(*path)}. Rename one of them."
            )


def load(path: PathLike, like: Any = None) -> Tree:
    """Read what :func:`save` wrote.

    Args:
        path: the file.
        like: a tree of the same structure, or the ``Functional`` that the params belong to.
            Without one the result is flat.

    Returns:
        The tree, or ``{dotted name: leaf}``.

    Raises:
        CheckpointError: no such file, one without low-bit leaves, a damaged one, or another
            tree than ``like``.

    >>> import tempfile
    >>> from zfunc.quant.trees import quantize_tree
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save(f"{folder}/q.safetensors", quantize_tree({"w": torch.ones(2, 4)}, bits=4))
    ...     load(file)
    {'w': QTensor((2, 4) float32 in int4, per row, symmetric, 8 bytes)}
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file. quant.save(path, params) writes one.")
    metadata, tensors = _opened(file, values=True)
    if HEADER not in metadata:
        raise CheckpointError(
            f"{file} has no {HEADER!r} in its header: it holds plain parameters. Quantise them: "
            "zf.quantize(fn, bits=8).place(path)."
        )
    leaves = _leaves(file, metadata[HEADER], tensors)
    return leaves if like is None else _shaped(file, leaves, like)


def _opened(file: Path, values: bool = False) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's metadata, and its tensors if ``values``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys() if values else ()
            return opened.metadata() or {}, {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no whole safetensors file: {error}.") from None


def is_low_bit(path: PathLike) -> bool:
    """Whether a path is a file that :func:`save` wrote."""
    return stored_bits(path) is not None


def stored_bits(path: PathLike) -> int | None:
    """Whether a file that :func:`save` wrote stores its codes in 8 or in 4 bits.

    Returns:
        The wider one, if there are both; None for any other path.
    """
    if not Path(path).is_file():
        return None
    try:
        text = _opened(Path(path))[0].get(HEADER)
    except CheckpointError:
        return None
    if text is None:
        return None
    try:
        return 4 if all(entry["bits"] <= 4 for entry in json.loads(text).values()) else 8
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 8  # a damaged header: `load` says so


def _leaves(file: Path, text: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise TypeError(f"it is a {type(header).__name__}")
        leaves: dict[str, Any] = {
            name: _leaf(
                name, entry, {part: tensors.pop(f"{name}.{part}") for part in entry["crc32"]}
            )
            for name, entry in header.items()
        }
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: its header does not describe what it holds ({error}). Write it anew with "
            "quant.save."
        ) from None
    return {**tensors, **leaves}


def _leaf(name: str, entry: dict[str, Any], parts: dict[str, Tensor]) -> QTensor:
    """One leaf, after a look at everything that a product with it relies on."""
    form = Format(entry["bits"], entry["group_size"], entry["symmetric"], entry["dynamic"])
    if form.bits > 8 or (form.group_size or 0) >= 1 << 31:
        raise ValueError(f"{name}: {form.bits} bits in groups of {form.group_size}")
    shape, dtype = torch.Size(entry["shape"]), _DTYPES[entry["dtype"]]
    turned = entry["transposed"]
    if len(shape) < (2 if turned else 1) or type(turned) is not bool:
        raise ValueError(f"{name}: shape {tuple(shape)}")
    if parts.keys() != form.parts(0, 1).keys():
        raise CheckpointError(f"{name} has {sorted(parts)}; expected {list(form.parts(0, 1))}.")
    scale, zero = parts["scale"], parts.get("zero")
    try:
        leaf = QTensor(parts["codes"], scale, zero, form, shape, dtype, turned)
    except PlacementError as error:
        raise CheckpointError(f"{name}: {error}") from None
    for part, x in parts.items():
        if _checksum(x) != entry["crc32"][part]:
            raise CheckpointError(
                f"{name}.{part} is not what was written: its checksum differs. The file is "
                "damaged or was changed; take another copy."
            )
    signed = form.symmetric and form.packed
    if not bool((torch.isfinite(scale) & ((scale != 0) if signed else (scale > 0))).all()):
        raise CheckpointError(
            f"{name}.scale has values that are {'0 or infinite' if signed else 'not positive'}, or "
            "no numbers."
        )
    return leaf


def _checksum(x: Tensor) -> int:
    held: Any = x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(held)


def _shaped(file: Path, leaves: dict[str, Any], like: Any) -> Tree:
    """The leaves in the structure of ``like``."""
    params = getattr(like, "params", like)
    keys, guides, spec = optree.tree_flatten_with_path(params, namespace=NAMESPACE)
    names = [dotted(*key) for key in keys]
    missing = [name for name in names if name not in leaves]
    extra = sorted(leaves.keys() - set(names))
    if missing or extra:
        raise CheckpointError(
            f"{file} holds other leaves than `like`: it lacks {', '.join(missing[:3]) or 'none'} "
            f"and has {', '.join(extra[:3]) or 'none'} besides."
        )
    for name, guide in zip(names, guides, strict=True):
        if leaves[name].shape != guide.shape:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(leaves[name].shape)}, in `like` it has "
                f"{tuple(guide.shape)}."
            )
    return optree.tree_unflatten(spec, [leaves[name] for name in names])
