"""From one kind of checkpoint to another, a leaf at a time: what ``zfunc convert`` does.

Kinds: ``zfunc`` (what ``zf.save`` writes), ``safetensors`` (Hugging Face's files, params
alone), ``dcp`` (torch.distributed.checkpoint) and, to be read only, ``deepspeed``
(DeepSpeed's universal checkpoints). The last two are partly pickle, which can run code: they
are read only when they are asked for by name, and then by unpicklers that know nothing but
tensors and numbers.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.errors import CheckpointError
from zfunc.files.checkpoint import save
from zfunc.files.elements import Elements
from zfunc.files.folder import MANIFEST, inspect, list_steps, read_manifest
from zfunc.files.inventory import TensorLeaf
from zfunc.files.pretrained import export_safetensors
from zfunc.files.reading import Reader
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.trees.nodes import LeafInfo, Placed, Span

__all__ = ["KINDS", "OpenCheckpoint", "convert", "kind_of", "open_source"]

PathLike = str | os.PathLike[str]
KINDS = ("zfunc", "safetensors", "dcp")
PICKLED = {"dcp": "torch.distributed.checkpoint", "deepspeed": "DeepSpeed"}
STATIC = "__zfunc_static__"  # where dcp keeps numbers and strings, as JSON in a uint8 tensor
MOMENTS = {"fp32": "params", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that can be read leaf by leaf.

    Attributes:
        tensors: name -> shape and dtype.
        read: name -> the full leaf.
        static: reads the leaves that are no tensors.
        step: the step count, where it is known.
        extra: what each rank saved beside the state; it has no place in another form.
    """

    tensors: dict[str, TensorLeaf]
    read: Callable[[str], Tensor]
    static: Callable[[], dict[str, Any]] = dict
    step: int | None = None
    extra: tuple[Any, ...] = ()

    def renamed(self, names: dict[str, str]) -> OpenCheckpoint:
        """These tensors alone, under new names: ``{new: old}``."""
        tensors = {new: self.tensors[old] for new, old in names.items()}
        return OpenCheckpoint(tensors, lambda new: self.read(names[new]), step=self.step)


class OnDisk(Placed):
    """A node that stands for the tensors of a source; one leaf at a time is in memory."""

    resident = False

    def __init__(self, source: OpenCheckpoint) -> None:
        self.source, self.paths = source, list(source.tensors)

    def held(self) -> Sequence[Tensor | None]:
        return ()

    def names(self) -> list[str]:
        return self.paths

    def leaf_infos(self) -> list[LeafInfo]:
        leaves = self.source.tensors.items()
        return [LeafInfo((name,), leaf.shape, leaf.dtype) for name, leaf in leaves]

    def spans(self) -> list[Span]:
        leaves = self.source.tensors.values()
        return [Span(i, 0, leaf.numel, (0,)) for i, leaf in enumerate(leaves)]

    def streamed(self) -> Iterator[tuple[Span, Tensor]]:
        for span in self.spans():
            yield span, self.source.read(self.paths[span.index]).reshape(-1)


def convert(
    source: PathLike, target: PathLike, to: str | None = None, kind: str | None = None
) -> str:
    """Write a checkpoint in another form.

    Args:
        source: a folder, or a single safetensors file.
        target: a folder, made if need be.
        to: one of ``KINDS``; by default ``safetensors`` for what zfunc, dcp or DeepSpeed
            wrote, and ``zfunc`` for safetensors.
        kind: what the source is, one of ``KINDS`` or ``deepspeed``. It is found out, but for
            ``dcp`` and ``deepspeed``, which are pickles and have to be named.

    Returns:
        One line that says what was done, and what was left out.

    Raises:
        CheckpointError: the source is damaged, of no known kind or a pickle that nobody has
            asked for, or the target cannot be written.
        ValueError: ``to`` is no kind that can be written, or ``kind`` none that can be read.
    """
    kind = _asked_for(Path(source), kind)
    to = to or ("zfunc" if kind == "safetensors" else "safetensors")
    if to not in KINDS:
        raise ValueError(f"to={to!r}: expected one of {', '.join(KINDS)}")
    opened = open_source(source, kind)
    extra = opened.extra
    if to == "safetensors":
        opened = _params_of(opened)
        export_safetensors(target, OnDisk(opened))
    elif to == "zfunc":
        if kind == "safetensors":
            opened = opened.renamed({f"params.{name}": name for name in opened.tensors})
        save(target, {"": OnDisk(opened), **opened.static()}, step=opened.step or 0)
    else:
        _write_dcp(target, opened)
    size = sum(leaf.nbytes for leaf in opened.tensors.values())
    said = f"{kind} -> {to}: {len(opened.tensors)} tensors, {size:,} bytes, in {target}"
    return f"{said}; not the `extra` of {len(extra)} rank(s): zf.extra reads it" if extra else said


def _params_of(source: OpenCheckpoint) -> OpenCheckpoint:
    """The entries below ``params``, under their own names; everything, if there is no such."""
    names = {n.removeprefix("params."): n for n in source.tensors if n.startswith("params.")}
    return source.renamed(names or {name: name for name in source.tensors})


def kind_of(path: Path) -> str:
    """What kind of checkpoint lies there.

    Raises:
        CheckpointError: none that is known.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return "safetensors"
    if path.is_dir():
        if (path / MANIFEST).exists() or any(path.glob("step-*/" + MANIFEST)):
            return "zfunc"
        if any(path.glob("*.safetensors")):
            return "safetensors"
        if (path / ".metadata").exists():
            return "dcp"
        if any(path.glob("zero/*/fp32.pt")):
            return "deepspeed"
    raise CheckpointError(
        f"{path} is no checkpoint that zfunc can read: neither its own (step-00000012), nor "
        "*.safetensors, nor torch.distributed.checkpoint (.metadata), nor DeepSpeed's universal "
        "form (zero/*/fp32.pt; ds_to_universal.py makes it)."
    )


def _asked_for(path: Path, kind: str | None) -> str:
    """The kind that was named, or that which is found, if it is no pickle."""
    if kind is not None and kind not in (*KINDS, *PICKLED):
        raise ValueError(f"kind={kind!r}: expected one of {', '.join((*KINDS, 'deepspeed'))}")
    found = kind or kind_of(path)
    if kind is None and found in PICKLED:
        raise CheckpointError(
            f"{path} is a checkpoint of {PICKLED[found]}, which is partly pickle: it is read only "
            f"when it is asked for by name (zfunc convert --from {found} {path} ...), and then "
            "nothing but tensors and numbers is taken from it."
        )
    return found


def open_source(path: PathLike, kind: str | None = None) -> OpenCheckpoint:
    """A checkpoint to be read leaf by leaf.

    Args:
        kind: what it is; found out if it is no pickle.

    Raises:
        CheckpointError: it is damaged, of no known kind, or a pickle that nobody has asked for.
    """
    opening = {
        "zfunc": _open_zfunc,
        "safetensors": _open_safetensors,
        "dcp": _open_dcp,
        "deepspeed": _open_deepspeed,
    }
    return opening[_asked_for(Path(path), kind)](Path(path))


def _open_zfunc(path: Path) -> OpenCheckpoint:
    """The newest good one."""
    for step, folder in list_steps(path).items():
        if inspect(step, folder, thorough=False).good:
            break
    else:
        raise CheckpointError(f"{path} has no good checkpoint: zf.checkpoints(path) says why.")
    manifest = read_manifest(folder)
    tensors = {name: TensorLeaf(leaf.shape, leaf.dtype) for name, leaf in manifest.leaves.items()}

    def read(name: str) -> Tensor:
        out = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        with Reader(folder, manifest) as reader:
            reader.fill(name, Elements(0, out.numel()), out.view(-1))
        return out

    return OpenCheckpoint(tensors, read, lambda: manifest.static, manifest.step, manifest.extra)


def _open_safetensors(path: Path) -> OpenCheckpoint:
    files = SafetensorsFiles(path)
    return OpenCheckpoint(files.tensors, files.read)


# --- torch.distributed.checkpoint ---------------------------------------------------------------


def _open_dcp(path: Path) -> OpenCheckpoint:
    from zfunc.files.distcp import Distcp

    files = Distcp(path)
    static, step = _noted(files.tensor(STATIC)) if STATIC in files.tensors else ({}, None)
    others = [name for name in files.others if name not in static]
    tensors = {name: leaf for name, leaf in files.tensors.items() if name != STATIC}

    def statics() -> dict[str, Any]:
        return static | {name: files.other(name) for name in others}

    return OpenCheckpoint(tensors, files.tensor, statics, step)


def _noted(data: Tensor) -> tuple[dict[str, Any], int | None]:
    document = json.loads(bytes(data.tolist()))
    return document["static"], document["step"]


def _write_dcp(target: PathLike, source: OpenCheckpoint) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    class Streaming(DefaultSavePlanner):
        """Knows shapes alone, and reads a leaf when it is written."""

        def resolve_data(self, write_item: Any) -> Any:
            name = write_item.index.fqn
            return note if name == STATIC else source.read(name)

    note = _note(source)
    empty = {
        name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        for name, leaf in source.tensors.items()
    }
    state = {**empty, STATIC: note}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save_dcp(state, checkpoint_id=target, planner=Streaming(), no_dist=True)


def _note(source: OpenCheckpoint) -> Tensor:
    text = json.dumps({"step": source.step, "static": source.static()}).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


# --- DeepSpeed's universal checkpoints ----------------------------------------------------------


def _open_deepspeed(path: Path) -> OpenCheckpoint:
    """``zero/<name>/fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` under ``params.<name>``, ..."""
    files = {
        f"{entry}.{folder.name}": folder / f"{kind}.pt"
        for kind, entry in MOMENTS.items()
        for folder in sorted((path / "zero").iterdir())
        if (folder / f"{kind}.pt").exists()
    }
    tensors = {}
    for name, file in files.items():
        x = _tensor_in(file)
        tensors[name] = TensorLeaf(tuple(x.shape), x.dtype)
    return OpenCheckpoint(tensors, lambda name: _tensor_in(files[name]))


def _tensor_in(file: Path) -> Tensor:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle may raise anything
        raise CheckpointError(f"{file} cannot be read: {error!r:.300}") from None
    tensor = found.get("param") if isinstance(found, dict) else found
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{file} holds a {type(tensor).__name__}, expected a tensor.")
    return tensor
