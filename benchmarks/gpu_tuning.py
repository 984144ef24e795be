"""Which launch configurations of a kernel are tried on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["candidates"]


def candidates(name: str, now: dict[str, int]) -> Iterator[dict[str, int]]:
    """Launch configurations to try, the one in force first; ``PROGRAMS`` are for each processor."""
    yield now
    if name.endswith("_mm"):
        warps = (1, 2, 4) if name == "w4_mm" else (2, 4, 8)
        for block, warp in ((32, warps[0]), (64, warps[1]), (128, warps[1]), (128, warps[2])):
            for stages, programs in ((3, 2), (5, 2), (4, 4)):
                more = {"BLOCK": block, "num_warps": warp, "num_stages": stages}
                yield now | more | {"PROGRAMS": programs}
    else:
        for block, warp in ((1, 4), (2, 4), (2, 8), (4, 8)):
            yield now | {"BLOCK": now["BLOCK"] * block, "num_warps": warp}
