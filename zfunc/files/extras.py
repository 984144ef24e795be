"""What a program saves beside the state: one JSON value for each rank, in the manifest.

It has that file's fate: there when the checkpoint is, under the same digest, and gone with it.
Readers of earlier versions pass over it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

from zfunc.errors import CheckpointError
from zfunc.files.background import settle
from zfunc.files.chunks import strict_json
from zfunc.files.folder import candidates, check_whole, passed_over
from zfunc.files.manifest import NewerVersion
from zfunc.files.saving import agreed
from zfunc.ranks.axes import group

__all__ = ["copied", "extra"]


def extra(path: str | os.PathLike[str], step: int | None = None) -> list[Any]:
    """What ``zf.save(..., extra=...)`` was given: a value for each rank that saved; a collective.

    Every rank gets the whole list, however many ranks there are now. The length of the list is the
    number of ranks that saved.

    Args:
        path: the folder that was given to ``save``, or that of a single checkpoint.
        step: the number of the checkpoint; by default the last saved. Data that are damaged are
            noticed by ``restore``, which reads them. So after it say ``step=int(state.step)``.

    Returns:
        The values in the order of ranks. A rank that gave none, where others did, has ``None``.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of a newer version, or it
            was saved without ``extra``.

    >>> import tempfile
    >>> from zfunc.files.checkpoint import save
    >>> folder = tempfile.mkdtemp()
    >>> saving = save(folder, {"step": 3}, extra={"samples": 96})
    >>> extra(folder)
    [{'samples': 96}]
    """
    settle()
    ranks, root = group(None, "data"), Path(path)
    text = agreed(ranks, lambda: _read(root, step) if ranks.rank == 0 else None, label="extra")
    found: list[Any] = json.loads(ranks.exchange(text, label="extra")[0])
    return found


def _read(root: Path, step: int | None) -> str:
    damaged: list[str] = []
    for number, folder in candidates(root, step):
        try:
            manifest = check_whole(folder)
        except NewerVersion:
            raise
        except CheckpointError as error:
            damaged.append(f"step {number}: {error}")
            continue
        if damaged:
            warnings.warn(passed_over("read", damaged, number), stacklevel=4)
        if not manifest.extra:
            raise CheckpointError(
                f"{folder} was saved without extra: it has the state alone. Give "
                "zf.save(path, state, extra=...) a value, or begin where there is none."
            )
        return json.dumps(manifest.extra)
    raise CheckpointError(f"{root} has no good checkpoint. " + "; ".join(damaged))


def copied(value: Any) -> Any:
    """A copy of a value that JSON can hold; tuples become lists.

    Raises:
        CheckpointError: it has something that JSON has not; the message says where.

    >>> copied({"position": 12, "files": ("a", "b")})
    {'position': 12, 'files': ['a', 'b']}
    """
    try:
        return strict_json(json.dumps(_plain(value, "extra")))
    except (ValueError, RecursionError) as error:  # digits, depth
        raise CheckpointError(f"extra is no JSON value: {error}") from None


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if not isinstance(value, dict):
        what = f"{value!r}" if isinstance(value, float) else f"a {_name(value)}"
        raise CheckpointError(
            f"{where} is {what}, which JSON cannot hold: expected None, bools, ints, finite "
            "floats, strings, and lists and dicts of these. A tensor has its place in the state, "
            "or is written as x.tolist()."
        )
    for key in value:
        if type(key) is not str:  # json would make it one, and nobody finds it again
            raise CheckpointError(
                f"{where} has the key {key!r} ({_name(key)}): keys of JSON are strings."
            )
    return {key: _plain(x, f"{where}[{key!r}]") for key, x in value.items()}


def _name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
