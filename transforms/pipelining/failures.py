"""An error in one stage of a pipeline: it says where, and all ranks hear of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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


@contextmanager
def telling(
    runs: Mapping[tuple[int, int], ChunkRun], action: tuple[str, int, int], stage: int, chunks: int
) -> Iterator[None]:
    """A block that is one action of a stage.

    Args:
        runs: of chunks, by microbatch and chunk, with that of this action, once it has begun.
        action: its kind, microbatch and chunk.
        chunks: how many each stage has.

    Raises:
        Exception: whatever is raised in the block, with its place in the message, or in a note;
            the other ranks raise ``DesyncError`` with the same text. They wait for what will not
            come, so no rank goes on in these groups before ``zf.recover_world``.
    """
    try:
        yield
    except DesyncError:  # another rank has told, or will
        raise
    except Exception as error:
        kind, i, k = action
        run = runs.get((i, k))
        chunk = f", chunk {k}" if chunks > 1 else ""
        me = f"stage {stage} of the pipeline (rank {current().rank}){chunk}"
        place = f"{me}, {NAMES[kind]} of microbatch {i}"
        if run is not None:
            place += f", {run.place}"
        told = f"{place}: {type(error).__name__}: {error}"
        for group in tuple(current().groups):
            if isinstance(group, ConnectedGroup):
                group.fail(DesyncError(told))
        found = located(error, place)
        if found is error:
            raise
        raise found from error
