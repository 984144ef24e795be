"""Checkpoints of torch.distributed.checkpoint, read without running what is pickled in them.

Its metadata, and leaves that are no tensors, are pickles, which can run any code. Here the metadata
may name nothing but the classes that describe tensors, and leaves are read as ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _get_layout

from zfunc.errors import CheckpointError
from zfunc.files.chunks import NAMES
from zfunc.files.inventory import TensorLeaf

__all__ = ["Distcp"]

_DESCRIBING = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _DESCRIBING},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in NAMES},
    ("torch", "complex128"): torch.complex128,
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


class _Unpickler(pickle.Unpickler):
    """Knows the allowed names, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which describes no tensor; it may be meant to run code"
            )
        return _ALLOWED[module, name]


class _Reader(filesystem.FileSystemReader):
    """Reads the metadata once, by the unpickler above."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.described = _Unpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
        if not isinstance(self.described, metadata.Metadata):
            raise pickle.UnpicklingError(f"it is a {type(self.described).__name__}")
        for stored in self.described.storage_data.values():
            file = PurePosixPath(stored.relative_path)
            if file.is_absolute() or ".." in file.parts:
                raise pickle.UnpicklingError(f"it names {str(file)!r}, outside the folder")
        self.described.storage_meta = metadata.StorageMeta()

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self.described


class _Planner(DefaultLoadPlanner):
    """Takes numbers, strings and lists of them; what else is pickled is an error."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class Distcp:
    """A folder that ``torch.distributed.checkpoint`` has written.

    Attributes:
        tensors: name -> shape and dtype.
        others: names of the leaves that are no tensors.

    Raises:
        CheckpointError: it cannot be read, or its metadata are more than that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
            found = self._reader.described.state_dict_metadata.items()
            self.tensors = {
                name: TensorLeaf(tuple(map(int, torch.Size(x.size))), x.properties.dtype)
                for name, x in found
                if isinstance(x, metadata.TensorStorageMetadata)
            }
        except Exception as error:  # unpickling may raise anything
            raise CheckpointError(f"{path / '.metadata'} cannot be read: {error!r:.300}") from None
        self.others = tuple(name for name, _ in found if name not in self.tensors)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        leaf = self.tensors[name]
        return self._loaded(name, lambda: torch.empty(leaf.shape, dtype=leaf.dtype))

    def other(self, name: str) -> Any:
        """A number, a string, or a list or dict of such."""
        return self._loaded(name, lambda: None)

    def _loaded(self, name: str, empty: Callable[[], Any]) -> Any:
        try:
            into = {name: empty()}
            with warnings.catch_warnings():  # that it runs in one process, as it is told to
                warnings.simplefilter("ignore", UserWarning)
                load(
                    into,
                    storage_reader=self._reader,
                    planner=_Planner(flatten_state_dict=False),
                    no_dist=True,
                )
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise CheckpointError(f"{self.path}: {name} cannot be read: {_said(error)}") from None
        return into[name]


def _said(error: BaseException) -> str:
    """The first failure alone, without where in torch it came from."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{error!r:.300}"
