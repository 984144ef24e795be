"""Parameters in Hugging Face's files: ``export_safetensors`` and ``import_safetensors``.

``model.safetensors``, or shards ``model-00001-of-00003.safetensors`` with an index, under
the names of the module's ``state_dict`` (tied weights once). Every rank writes and reads
the elements that it owns at their place in the files, a block at a time: nothing is
gathered, and nobody holds more than a block beside its own part.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files import chunks
from zfunc.files.chunks import NAMES
from zfunc.files.elements import Elements, elements_of
from zfunc.files.folder import check_room, fsync_folder, said
from zfunc.files.inventory import Inventory, TensorLeaf, own_share, rebuilt, take_stock
from zfunc.files.replicas import Replicas, check_replicas, look_at
from zfunc.files.saving import agreed
from zfunc.files.tensorfiles import INDEX, SINGLE, SafetensorsFiles
from zfunc.ranks.axes import group

__all__ = ["export_safetensors", "import_safetensors"]

PathLike = str | os.PathLike[str]
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class _Shard:
    """A file to be written: its name, its header, and where each leaf begins."""

    name: str
    header: bytes
    offsets: dict[str, int]
    size: int


def export_safetensors(path: PathLike, params: Any, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write parameters, placed or plain, as Hugging Face does; a collective.

    Args:
        path: a folder, made if need be; files of an earlier export give way to the new ones
            when those are complete. A name that ends in ``.safetensors`` is one file.
        params: a tree; its dotted paths are the names.
        shard_bytes: how large a file may become; a larger leaf has one of its own.

    Returns:
        The files written, the index included.

    Raises:
        CheckpointError: a leaf is no tensor, replicas have diverged, or what the system refuses.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> [file.name for file in export_safetensors(folder, {"w": torch.ones(3)})]
    ['model.safetensors']
    >>> import_safetensors(folder, like={"w": torch.zeros(3)})
    {'w': tensor([1., 1., 1.])}
    """
    ranks, target = group(None, "data"), Path(path)
    on_all = partial(agreed, ranks, label="export")
    stock, seen = on_all(lambda: _offer(params))
    single = target.suffix == ".safetensors"
    folder = target.parent if single else target
    shards = _shards(stock, target.name if single else None, shard_bytes)
    offers = ranks.exchange((uuid.uuid4().hex[:8], seen.summary()), label="export")
    check_replicas(ranks, stock, seen, [summary for _, summary in offers], label="export")
    token = offers[0][0]
    try:
        on_all(lambda: None if ranks.rank else _create(folder, shards, token))
        on_all(lambda: _write(stock, folder, shards, token))
        done = on_all(lambda: None if ranks.rank else _reveal(stock, folder, shards, token, single))
    except BaseException:
        if ranks.rank == 0:
            for name in (*(shard.name for shard in shards), INDEX):
                with suppress(OSError):
                    _partial(folder, name, token).unlink()
        raise
    files: list[Path] = ranks.exchange(done, label="export")[0]
    return files


def _offer(params: Any) -> tuple[Inventory, Replicas]:
    stock = _params_in(params)
    for name in stock.tensors:
        chunks.check_name(name)
    return stock, look_at(stock)


def _params_in(params: Any) -> Inventory:
    stock = take_stock(params)
    for name, value in stock.static.items():
        if value is not None:
            raise CheckpointError(f"{name} is {value!r}, which is no tensor: export params alone.")
    for name, leaf in stock.tensors.items():
        if leaf.dtype not in NAMES:
            raise CheckpointError(f"{name} has dtype {leaf.dtype}, for which files have no name.")
    return stock


def _shards(stock: Inventory, single: str | None, limit: int) -> list[_Shard]:
    rows: list[dict[str, TensorLeaf]] = [{}]
    size = 0
    for name, leaf in stock.tensors.items():
        if rows[-1] and size + leaf.nbytes > limit and single is None:
            rows.append({})
            size = 0
        rows[-1][name] = leaf
        size += leaf.nbytes
    names = [f"model-{i:05d}-of-{len(rows):05d}.safetensors" for i in range(1, len(rows) + 1)]
    if len(rows) == 1:
        names = [single or SINGLE]
    shards = []
    for name, row in zip(names, rows, strict=True):
        header, offsets = chunks.header_of({key: (x.dtype, x.shape) for key, x in row.items()})
        size = len(header) + sum(leaf.nbytes for leaf in row.values())
        shards.append(_Shard(name, header, offsets, size))
    return shards


def _partial(folder: Path, name: str, token: str) -> Path:
    return folder / f".{name}.{token}"


def _create(folder: Path, shards: list[_Shard], token: str) -> None:
    with said(folder):
        folder.mkdir(parents=True, exist_ok=True)
        need = sum(shard.size for shard in shards)
        check_room(folder, need, f"the files need {need:,}.")
        for shard in shards:
            with _partial(folder, shard.name, token).open("xb") as file:
                file.write(shard.header)
                file.truncate(shard.size)


def _write(stock: Inventory, folder: Path, shards: list[_Shard], token: str) -> None:
    homes = {name: shard for shard in shards for name in shard.offsets}
    with said(folder), ExitStack() as stack:
        fds: dict[str, int] = {}
        for name, span, x in stock.streamed():
            shard, dtype = homes[name], stock.tensors[name].dtype
            a, b = own_share(span)
            if a >= b:
                continue
            if shard.name not in fds:
                fds[shard.name] = os.open(
                    _partial(folder, shard.name, token), os.O_WRONLY | os.O_CLOEXEC
                )
                stack.callback(os.close, fds[shard.name])
            for start, stop in chunks.pieces_of(a, b, dtype):
                block = x[start:stop].cpu().contiguous()
                part = elements_of(span).part(start, stop)
                _write_runs(fds[shard.name], shard.offsets[name], part, block)
        for fd in fds.values():
            os.fsync(fd)


def _write_runs(fd: int, offset: int, part: Elements, block: Tensor) -> None:
    """Elements of a leaf that begins at ``offset``, each run at its place."""
    view, at, size = chunks.as_bytes(block), 0, block.itemsize
    for low, high in part.intervals():
        end = at + (high - low) * size
        chunks.write_exactly(fd, view[at:end], offset + low * size)
        at = end


def _reveal(
    stock: Inventory, folder: Path, shards: list[_Shard], token: str, single: bool
) -> list[Path]:
    """Give the files their names, and let those of an earlier export go."""
    with said(folder):
        for shard in shards:
            os.replace(_partial(folder, shard.name, token), folder / shard.name)
        files = [folder / shard.name for shard in shards]
        if len(shards) > 1:
            files.append(folder / INDEX)
            index = {
                "metadata": {"total_size": sum(x.nbytes for x in stock.tensors.values())},
                "weight_map": {name: s.name for s in shards for name in sorted(s.offsets)},
            }
            partial = _partial(folder, INDEX, token)
            partial.write_text(json.dumps(index, indent=2) + "\n")
            os.replace(partial, folder / INDEX)
        for file in [] if single else list(folder.iterdir()):
            ours = file.name in (SINGLE, INDEX) or SHARD.fullmatch(file.name)
            if ours and file not in files:
                file.unlink()
        fsync_folder(folder)
    return files


Names = Mapping[str, str] | Callable[[str], str] | None


def import_safetensors(path: PathLike, like: Any, names: Names = None, strict: bool = True) -> Any:
    """Read parameters from Hugging Face's files into the placement of ``like``; a collective.

    Floating-point numbers are converted to the dtype of ``like`` (rounded to nearest); any
    other difference of dtypes is an error. Files may name a tied weight twice: what has no
    place in the tree, but is bitwise one of its tensors, is passed over.

    Args:
        path: a folder with ``model.safetensors``, an index and its shards, or other
            ``*.safetensors`` files; or one such file.
        like: params, such as ``step.place(state).params`` or ``functional.params``. They are
            not changed.
        names: what the files call a leaf, where that is not its dotted path: a function of
            the path, or a dict.
        strict: whether tensors for which the tree has no place are an error.

    Returns:
        Params placed like ``like``.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit; all names are listed.
    """
    ranks = group(None, "data")
    on_all = partial(agreed, ranks, label="import")
    stock = on_all(lambda: _params_in(like))
    files = on_all(lambda: SafetensorsFiles(path))
    called = {name: _called(names, name) for name in stock.tensors}
    on_all(lambda: None if ranks.rank else _check(stock, files, called, strict, path))

    def fill(name: str, elements: Elements, out: Tensor) -> None:
        files.fill(called[name], elements, out)

    return on_all(lambda: rebuilt(stock, stock.static, fill))


def _called(names: Names, name: str) -> str:
    if names is None:
        return name
    return names(name) if callable(names) else names.get(name, name)


def _check(
    stock: Inventory,
    files: SafetensorsFiles,
    called: dict[str, str],
    strict: bool,
    path: PathLike,
) -> None:
    there = files.tensors
    wanted = set(called.values())
    missing = [name for name, its in called.items() if its not in there]
    wrong = [
        f"{name} ({_kind(there[its])} there, {_kind(stock.tensors[name])} here)"
        for name, its in called.items()
        if its in there and not _convertible(there[its], stock.tensors[name])
    ]
    known = [name for name in wanted if name in there]
    unexpected = [
        name
        for name in there
        if strict and name not in wanted and not any(files.same(name, its) for its in known)
    ]
    groups = {"Missing": missing, "Unexpected": unexpected, "Differing": wrong}
    found = " ".join(f"{what}: {', '.join(some)}." for what, some in groups.items() if some)
    if found:
        raise CheckpointError(
            f"{os.fspath(path)} does not fit these params. {found} `names` says what the files "
            "call a leaf, strict=False passes over what is unexpected."
        )


def _kind(leaf: TensorLeaf) -> str:
    return f"{NAMES[leaf.dtype]} {list(leaf.shape)}"


def _convertible(there: TensorLeaf, here: TensorLeaf) -> bool:
    floating = there.dtype.is_floating_point and here.dtype.is_floating_point
    return there.shape == here.shape and (there.dtype == here.dtype or floating)
