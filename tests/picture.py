"""The picture in docs/architecture.md: the rooms from top to bottom, and who imports whom.

    python -m tests.picture

Of the arrows those are left out that follow from others. On the right are the imports inside of a
function that run against the order.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

from tests.imports import arrows, lazy_arrows, room_of, table

__all__ = ["drawn"]

WIDTH, LEFT, RIGHT, ROW, HIGH = 900, 210, 800, 46, 34
STYLE = """
  .room { fill: #f6f8fa; stroke: #57606a; }
  .name { font: 600 14px sans-serif; fill: #1f2328; }
  .what { font: 12px sans-serif; fill: #424a53; }
  .arrow { fill: none; stroke: #6e7781; stroke-width: 1.3; marker-end: url(#tip); }
  .lazy { stroke-dasharray: 5 4; }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0 8 4 0 8z" fill="#6e7781"/></marker></defs>'
)


@cache
def ways() -> dict[str, set[str]]:
    """Which rooms each one imports."""
    found: dict[str, set[str]] = {room: set() for room in table()}
    for module, target, _ in arrows():
        a, b = room_of(module), room_of(target)
        if a != b and a in found and b in found:
            found[a].add(b)
    return found


@cache
def below(room: str) -> frozenset[str]:
    """All rooms that one leads to."""
    return frozenset(ways()[room].union(*map(below, ways()[room])))


def drawn() -> str:
    """The picture as SVG."""
    rooms, lines = list(table()), []
    for k, room in enumerate(rooms):
        known = ways()[room]
        straight = {x for x in known if not any(x in below(between) for between in known)}
        lines += [_arc(k, rooms.index(x), LEFT, -1, "arrow") for x in rooms if x in straight]
    for a, b in sorted(lazy_arrows()):
        ends = rooms.index(room_of(a)), rooms.index(room_of(b))
        lines.append(_arc(*ends, RIGHT, 1, "arrow lazy"))
    boxes = [_box(k, *row) for k, row in enumerate(table().items())]
    height = ROW * len(rooms) + 12
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    parts = [frame, f"<style>{STYLE}</style>", TIP, ground, *lines, *boxes, "</svg>"]
    return "\n".join(parts) + "\n"


def _arc(start: int, end: int, edge: int, side: int, kind: str) -> str:
    """From the lower part of one room's edge to the upper part of another's."""
    y, v = (ROW * k + 6 + HIGH // 2 for k in (start, end))
    lean = 6 if end > start else -6
    bulge = edge + side * (24 + 17 * abs(end - start))
    curve = f"M{edge} {y + lean} C{bulge} {y + lean} {bulge} {v - lean} {edge} {v - lean}"
    return f'<path class="{kind}" d="{curve}"/>'


def _box(row: int, room: str, what: str) -> str:
    y = ROW * row + 6
    box = f'x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{HIGH}" rx="5"'
    name, text = (f'x="{LEFT + gap}" y="{y + 22}"' for gap in (14, 130))
    return "\n".join(
        [
            f'<rect class="room" {box}/>',
            f'<text class="name" {name}>{room}</text>',
            f'<text class="what" {text}>{escape(what)}</text>',
        ]
    )


if __name__ == "__main__":
    (Path(__file__).resolve().parents[1] / "docs" / "architecture.svg").write_text(drawn())
