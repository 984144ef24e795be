"""Leaves of which ranks have parts, in files: saved by any ranks, restored by any others.

A leaf is split over T ranks, in runs of one of its dimensions, and each part is cut again, at any
element, over D ranks. Whatever T, D and dimension were when it was saved, what comes back is what
was there, bitwise, and what is missing or damaged is seen.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import zfunc as zf
from tests.laws.cases import assert_same, numbers
from tests.laws.parts import Parts
from zfunc.errors import CheckpointError
from zfunc.files import chunks, inventory, manifest
from zfunc.files.conversion import convert
from zfunc.files.elements import Elements, copy_blocks, covers, elements_of, overlaps
from zfunc.files.folder import read_manifest
from zfunc.layout.splits import Cut, Split, Strided
from zfunc.trees.nodes import Span

Splits = Callable[[int], dict[str, Split]]  # for so many ranks
SHAPES = {
    "column": (12, 5),
    "row": (7, 12),
    "middle": (3, 8, 4),
    "fused": (24, 3),
    "uneven": (5, 7),
    "shared": (4, 6),
    "last": (9, 4),
    "whole": (3, 3),
}
FULL = {name: numbers(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
ZERO = {name: torch.zeros_like(x) for name, x in FULL.items()}


def by_kind(ways: int) -> dict[str, Split]:
    """Splits of every kind; a part may be empty, and a row may be on several ranks."""
    cuts = {"column": Cut(0), "row": Cut(1), "middle": Cut(1, by=4), "fused": Cut(0, 3), "last": 1}
    found = {k: cut.split(SHAPES[k], ways) for k, cut in cuts.items() if isinstance(cut, Cut)}
    heads = [[2 * (r * 2 // ways), 2 * (r * 2 // ways) + 1] for r in range(ways)]
    found["shared"] = Split.of(0, heads if ways > 1 else [range(4)])
    some = [[i for i in range(7) if i * i % ways == r] for r in range(ways)]
    found["uneven"] = Split.of(1, some)
    last = [range(4), *([[]] * (ways - 1))]
    found["last"] = Split.of(1, last)
    return found


def by_other(ways: int) -> dict[str, Split]:
    """The same leaves along other dimensions."""
    dims = {"column": 1, "row": 0, "middle": 0 if ways < 4 else 2, "fused": 0, "shared": 1}
    return {k: Cut(dim).split(SHAPES[k], ways) for k, dim in dims.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a leaf, with borders in the middle of rows."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 88)
    monkeypatch.setattr(inventory, "SHARE", 4)


def write(path: Path, ways: int, data: int, splits: Splits = by_kind, **how: Any) -> None:
    def body() -> None:
        zf.save(path, {"p": Parts(FULL, splits(ways), ways), "step": 1}, **how).wait()

    zf.simulate(ways * data)(body)()


def check(path: Path, ways: int, data: int, splits: Splits = by_kind) -> None:
    def body() -> None:
        back = zf.restore(path, {"p": Parts(ZERO, splits(ways), ways), "step": 0})
        assert_same(back["p"].parts, Parts(FULL, splits(ways), ways).parts)

    zf.simulate(ways * data)(body)()


WORLDS = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)]


@pytest.mark.parametrize("there", WORLDS, ids=str)
def test_any_ranks_restore_what_any_others_have_saved(
    there: tuple[int, int], tmp_path: Path
) -> None:
    write(tmp_path, *there, block=there[1] != 2)
    assert all(found.good for found in zf.checkpoints(tmp_path))
    for here in WORLDS:
        check(tmp_path, *here)
    check(tmp_path, 2, 2, by_other)
    check(tmp_path, 4, 1, by_other)
    assert_same(zf.restore(tmp_path, {"p": ZERO, "step": 0})["p"], FULL)


def test_what_whole_leaves_have_saved_is_restored_into_parts(tmp_path: Path) -> None:
    zf.simulate(2)(lambda: zf.save(tmp_path, {"p": FULL, "step": 1}).step)()
    for here in WORLDS:
        check(tmp_path, *here)


def test_other_forms_have_what_parts_have_saved(tmp_path: Path) -> None:
    write(tmp_path / "saved", 3, 2)
    for to in ("safetensors", "dcp", "zfunc"):
        convert(tmp_path / "saved", tmp_path / to, to=to)
    for to in ("safetensors", "dcp"):
        convert(tmp_path / to, tmp_path / f"of {to}", to="safetensors", kind=to)
        found = load_file(tmp_path / f"of {to}" / "model.safetensors")
        assert_same({k.removeprefix("p."): v for k, v in found.items()}, FULL)
    check(tmp_path / "zfunc", 2, 1)


@pytest.mark.parametrize(("ways", "data"), WORLDS)
def test_model_files_are_written_and_read_by_parts(ways: int, data: int, tmp_path: Path) -> None:
    def body() -> None:
        mine = Parts(FULL, by_kind(ways), ways)
        zf.export_safetensors(tmp_path / "a", mine)
        like = Parts({k: x.float() for k, x in ZERO.items()}, by_kind(ways), ways)
        for new in (Parts(ZERO, by_kind(ways), ways), like):
            back = zf.import_safetensors(tmp_path / "a", new)
            same = {k: x.to(new.parts[k].dtype) for k, x in mine.parts.items()}
            assert_same(back.parts, same)

    zf.simulate(ways * data)(body)()
    assert_same(load_file(tmp_path / "a" / "model.safetensors"), FULL)


def test_model_files_are_read_run_by_run_where_runs_are_long(tmp_path: Path) -> None:
    """Then no byte is read that is not needed."""
    full = {"w": numbers((6, 2048), 1)}
    zf.export_safetensors(tmp_path, full)
    size = 6 * 1024 * 8
    seen: list[int] = []
    reader = chunks.read_exactly

    def watched(fd: int, into: Any, *where: Any) -> None:
        seen.append(memoryview(into).nbytes)
        reader(fd, into, *where)

    def body() -> None:
        splits = {"w": Cut(1).split((6, 2048), 2)}
        like = Parts({"w": torch.zeros(6, 2048, dtype=torch.float64)}, splits, 2)
        with patch.object(chunks, "read_exactly", watched):
            back = zf.import_safetensors(tmp_path, like)
        assert_same(back.parts, Parts(full, splits, 2).parts)

    with patch.object(chunks, "CHUNK_BYTES", 1 << 20):
        zf.simulate(2)(body)()
    assert sum(n for n in seen if n > 4096) == 2 * size


@pytest.mark.parametrize("width", [24, 2048])
def test_nothing_larger_than_a_chunk_is_read_at_once(width: int, tmp_path: Path) -> None:
    """Neither of model files nor of checkpoints, whether runs are short or long."""
    full = {"w": numbers((60, width), 1)}
    zf.export_safetensors(tmp_path / "files", full)
    seen: list[int] = []
    reader = chunks.read_exactly

    def watched(fd: int, into: Any, offset: int, path: Path) -> None:
        seen.extend([memoryview(into).nbytes] * (path.suffix == ".safetensors" and offset > 8))
        reader(fd, into, offset, path)

    def body() -> None:
        splits = {"w": Cut(1).split((60, width), 3)}
        mine = Parts(full, splits, 3)
        zf.save(tmp_path / "saved", {"p": mine}, step=1)
        like = Parts({"w": torch.zeros_like(full["w"])}, splits, 3)
        assert_same(zf.restore(tmp_path / "saved", {"p": like})["p"].parts, mine.parts)
        assert_same(zf.import_safetensors(tmp_path / "files", like).parts, mine.parts)

    with patch.object(chunks, "CHUNK_BYTES", 4096), patch.object(chunks, "read_exactly", watched):
        zf.simulate(3)(body)()
    assert len(seen) > 10 and max(seen) <= 4096


# --- what is in the files -----------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest, changed, with digests that fit."""
    file = path / "step-00000001" / "manifest.json"
    document = json.loads(file.read_bytes())
    for seal in ("head", "digest"):
        document.pop(seal)
    change(document)
    body = json.dumps(document)[:-1].encode()
    file.write_bytes(body + f',\n"digest": "{chunks.digest(body)}"}}\n'.encode())


def test_rows_are_told_once_a_leaf_and_chunks_are_as_large_as_others(tmp_path: Path) -> None:
    with patch.object(chunks, "CHUNK_BYTES", 1 << 20):
        write(tmp_path, 4, 1)
    document = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert document["version"] == 2
    row = document["leaves"]["p.row"]
    assert row["row"] == 12 and row["runs"] == [[[0, 3]], [[3, 6]], [[6, 9]], [[9, 12]]]
    assert [chunk[:3] + chunk[5:] for chunk in row["chunks"]] == [[r, 0, 21, r] for r in range(4)]
    assert "row" not in document["leaves"]["p.column"]  # its parts lie one behind the other


def test_without_such_leaves_all_is_as_it_was(tmp_path: Path) -> None:
    """Down to the byte: the digest is that of files which the version before has written."""

    class Fixed:
        hex = "0123456789abcdef"

    state = {"w": torch.arange(60.0).view(5, 12), "b": torch.arange(7), "step": 1}
    with patch("uuid.uuid4", lambda: Fixed):
        zf.simulate(3)(lambda: zf.save(tmp_path, state).step)()
    files = sorted((tmp_path / "step-00000001").iterdir())
    assert json.loads(files[0].read_text())["version"] == manifest.WITHOUT_ROWS == 1
    assert chunks.digest(b"".join(file.read_bytes() for file in files)) == BEFORE


BEFORE = "ad21a835d67e3714d874a3b909d97ced"


def test_an_older_zfunc_says_that_it_is_too_old(tmp_path: Path) -> None:
    write(tmp_path, 2, 1)
    with (
        patch.object(manifest, "VERSION", 1),
        pytest.raises(CheckpointError, match="has version 2, this zfunc reads up to 1"),
    ):
        zf.restore(tmp_path, {"p": ZERO, "step": 0})


@pytest.mark.parametrize("name", ["row", "uneven", "shared", "fused", "middle"])
def test_every_chunk_that_is_missing_is_missed(name: str, tmp_path: Path) -> None:
    write(tmp_path, 3, 2)
    whole = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    leaf = read_manifest(tmp_path / "step-00000001").leaves[f"p.{name}"]
    length = leaf.length
    assert length is not None
    for i in range(len(leaf.chunks)):
        left = [row.elements for j, row in enumerate(leaf.chunks) if j != i]
        others = {x for some in left for low, high in some.intervals() for x in range(low, high)}
        assert covers(leaf.numel, length, left) == (len(others) == leaf.numel)

        def drop(document: dict[str, Any], i: int = i) -> None:
            document["leaves"][f"p.{name}"]["chunks"].pop(i)

        rewritten(tmp_path, drop)
        assert [found.good for found in zf.checkpoints(tmp_path)] == [False]
        (tmp_path / "step-00000001" / "manifest.json").write_bytes(whole)


def test_manifests_with_rows_that_cannot_be_are_no_manifests(tmp_path: Path) -> None:
    write(tmp_path, 2, 1)
    whole = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    wrong: list[tuple[str, Any]] = [
        ("row", 0), ("row", 5), ("row", -12), ("row", "12"), ("runs", []), ("runs", [[[0, 6]]]),
        ("runs", [[[0, 6]], [[5, 13]]]), ("runs", [[[0, 6]], [[8, 6]]]), ("runs", [[[0, 6]], []]),
        ("runs", [[[0, 6]], [[0, 6]]]), ("runs", [[0, 6], [6, 12]]), ("runs", {}), ("runs", None),
    ]  # fmt: skip
    for key, value in wrong:
        rewritten(tmp_path, lambda d, k=key, v=value: d["leaves"]["p.row"].update({k: v}))
        with pytest.raises(CheckpointError, match="no manifest of a checkpoint"):
            read_manifest(tmp_path / "step-00000001")
        (tmp_path / "step-00000001" / "manifest.json").write_bytes(whole)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    write(tmp_path, 2, 2)
    rng = random.Random(1)
    files = sorted((tmp_path / "step-00000001").iterdir())
    for file in files:
        whole = file.read_bytes()
        for at in rng.sample(range(len(whole)), 40):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            assert [found.good for found in zf.checkpoints(tmp_path)] == [False], (file, at)
        file.write_bytes(whole)
    assert [found.good for found in zf.checkpoints(tmp_path)] == [True]


def test_ranks_that_share_a_part_and_differ_in_it_are_named(tmp_path: Path) -> None:
    def body() -> None:
        mine = Parts(FULL, by_kind(4), 4)
        if zf.rank() == 1:
            mine.parts["shared"][3] += 1
        zf.save(tmp_path, {"p": mine, "step": 1})

    with pytest.raises(CheckpointError, match=r"ranks 0 and 1 both have .* of p\.shared, with dif"):
        zf.simulate(4)(body)()
    assert not list(tmp_path.glob("*step-*"))


@pytest.mark.parametrize("block", [True, False])
def test_a_save_that_fails_leaves_what_was_there(block: bool, tmp_path: Path) -> None:
    """At every call that changes files, as if the process had ended there."""
    write(tmp_path, 2, 1)
    for n in range(1, 60):
        count, real = 0, os.pwrite

        def failing(*args: Any, n: int = n, real: Any = real) -> int:
            nonlocal count
            count += 1
            if count == n:
                raise OSError(28, "No space left on device")
            return int(real(*args))

        def body() -> None:
            zf.save(tmp_path, {"p": Parts(ZERO, by_kind(2), 2), "step": 2}, block=block).wait()

        with patch.object(os, "pwrite", failing):
            try:
                zf.simulate(2)(body)()
            except CheckpointError:
                check(tmp_path, 3, 1)
                assert sorted(x.name for x in tmp_path.iterdir()) == [".lock", "step-00000001"]
            else:
                assert count < n
                return
    raise AssertionError("no save went through")


# --- sets of elements ---------------------------------------------------------------------------


def some_elements(rng: random.Random, rows: int, length: int) -> Elements:
    """A random set: of the leaf, of its rows, or of longer rows."""
    kind = rng.randrange(3)
    if kind == 0:
        return Elements(*sorted(rng.choices(range(rows * length + 1), k=2)))
    factor = rng.choice([n for n in range(1, rows + 1) if rows % n == 0]) if kind == 2 else 1
    borders = sorted(rng.sample(range(length * factor + 1), 2 * rng.randint(1, length // 2)))
    pattern = Strided(length * factor, tuple(zip(borders[::2], borders[1::2], strict=True)))
    numel = pattern.width * (rows // factor)
    return Elements(*sorted(rng.choices(range(numel + 1), k=2)), pattern)


def listed(elements: Elements) -> list[int]:
    return [i for low, high in elements.intervals() for i in range(low, high)]


def test_what_sets_share_is_what_lists_of_their_elements_share() -> None:
    rng = random.Random(18)
    for _ in range(3000):
        rows, length = rng.choice([1, 2, 4, 6]), rng.randint(2, 9)
        first, second = (some_elements(rng, rows, length) for _ in range(2))
        a, b = listed(first), listed(second)
        got = torch.full((len(b),), -1)
        blocks = overlaps(first, second)
        copy_blocks(blocks, torch.tensor(a, dtype=torch.int64), got)
        assert got.tolist() == [x if x in set(a) else -1 for x in b], (first, second)
        assert sum(x.rows * x.width for x in blocks) == len(set(a) & set(b))
        assert listed(first.simple) == a
        assert not a or first.bounds == (a[0], a[-1] + 1)
        assert first.simple.rows is None or a != list(range(a[0], a[0] + len(a)))


def test_sets_cover_a_leaf_if_lists_of_their_elements_do() -> None:
    rng, found = random.Random(19), []
    for _ in range(3000):
        rows, length = rng.randint(1, 4), rng.randint(2, 4)
        sets = [some_elements(rng, rows, length) for _ in range(rng.randint(1, 6))]
        sets = [x for x in sets if x.rows is None or x.rows.length == length]
        found.append(covers(rows * length, length, sets))
        assert found[-1] == ({i for x in sets for i in listed(x)} == set(range(rows * length)))
    assert 100 < sum(found) < 2900


def test_parts_of_a_leaf_share_few_blocks_however_many_rows_it_has() -> None:
    splits = [Cut(1).split((4096, 96), ways) for ways in (2, 3)]
    for a, b in product(range(2), range(3)):
        sets = [
            elements_of(Span(0, 7, 4000 * split.width(r), (0,), split.rows((4096, 96), r)))
            for split, r in zip(splits, (a, b), strict=True)
        ]
        assert len(overlaps(*sets)) <= 9
    ends = [0, 100_000, 4096 * 96]
    for low, high in pairwise(ends):
        assert len(overlaps(Elements(low, high), sets[0])) <= 3


def test_rows_begin_where_a_leaf_of_each_rank_has_its_own() -> None:
    rows = Strided(6, ((0, 2), (4, 5)), first=12)
    assert listed(elements_of(Span(0, 1, 5, (0,), rows))) == [13, 16, 18, 19]
    with pytest.raises(CheckpointError, match="begins at element 13: expected a multiple"):
        elements_of(Span(0, 1, 5, (0,), Strided(6, ((0, 2),), first=13)))
