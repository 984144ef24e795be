"""An error in one stage of a pipeline: it says where, and all ranks hear of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zfunc.errors import DesyncError
from zfunc.ranks.connected import ConnectedGroup
from zfunc.ranks.world import current
from zfunc.rehearsal.chunk_run import ChunkRun
from zfunc.rehearsal.failures import located

__all__ = ["telling"]

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward (of inputs)",
    "W": "backward (of weights)",
}


@dataclass(frozen=True)
class telling:
    """A block that is one action of a stage.

    A class, since a generator turns ``StopIteration`` into another error without its place.

    Attributes:
        runs: of chunks, by microbatch and chunk, with that of this action, once it has begun.
        action: its kind, microbatch and chunk.
        stage: this rank's.
        chunks: how many each stage has.

    Raises:
        Exception: whatever is raised in the block, with its place in the message, or in a note;
            the other ranks raise ``DesyncError`` with the same text. They wait for what will not
            come, so no rank goes on in these groups before ``zf.recover_world``.
    """

    runs: Mapping[tuple[int, int], ChunkRun]
    action: tuple[str, int, int]
    stage: int
    chunks: int

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Of a DesyncError another rank has told, or will.
        if not isinstance(error, Exception) or isinstance(error, DesyncError):
            return
        place = self._place()
        told = f"{place}: {type(error).__name__}: {error}"
        for group in tuple(current().groups):
            if isinstance(group, ConnectedGroup):
                group.fail(DesyncError(told))
        found = located(error, place)
        if found is not error:
            raise found from error

    def _place(self) -> str:
        kind, i, k = self.action
        run = self.runs.get((i, k))
        chunk = f", chunk {k}" if self.chunks > 1 else ""
        me = f"stage {self.stage} of the pipeline (rank {current().rank}){chunk}"
        place = f"{me}, {NAMES[kind]} of microbatch {i}"
        return place if run is None else f"{place}, {run.place}"
