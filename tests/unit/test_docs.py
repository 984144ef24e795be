"""The pages run: every Python block of the README and of docs/, in order, outputs compared.

A page is read from top to bottom in one namespace, as a reader would type it. What a block
prints is shown in a ``text`` block right behind it, and so is the error with which it ends, if
that is the point: ``...`` stands for anything, numbers are compared as they are written.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import functools
import io
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.covering import Covering
from zfunc import optim, transforms

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a page computes in full with `--whole` alone: else so, and figures of that are not compared.
SMALLER = {"foresight.md": ("depth=96", "depth=4", "seen")}
FIGURE = re.compile(r"(?<=at the peak: ).*|\d[\d.,e+]*(?: [KMGT]?B\b)?")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A Python block of a page, where it begins, and the output shown behind it."""

    line: int
    code: str
    shown: str


def blocks(page: Path) -> Iterator[Block]:
    """The Python blocks of a page, in order."""
    text = page.read_text()
    full, less, name = SMALLER.get(page.name, ("", "", "")) if not Covering.whole else ("", "", "")
    text = text.replace(full, less) if full else text
    found = [*FENCE.finditer(text), None]
    for this, following in itertools.pairwise(found):
        assert this is not None
        if this[1] != "python":
            continue
        near = following is not None and not text[this.end() : following.start()].strip()
        shown = following[2] if following and near and following[1] == "text" else ""
        shown = FIGURE.sub("...", shown) if name and name in this[2] else shown
        yield Block(text.count("\n", 0, this.start()) + 2, this[2], shown)


def run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """What a block prints, and the error with which it ends, as Python would show it."""
    # Empty lines in front: a traceback names the page and the right line of it.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, namespace)
        except Exception as error:
            name = type(error).__name__
            if f"{name}: " not in block.shown:
                raise
            print(f"{name}: {error}")
    return out.getvalue()


def check(block: Block, got: str, page: Path) -> None:
    if doctest.OutputChecker().check_output(block.shown, got, FLAGS):
        return
    lines = difflib.unified_diff(
        block.shown.splitlines(), got.splitlines(), "shown", "got", lineterm=""
    )
    pytest.fail(f"{page.name}, line {block.line}:\n" + "\n".join(lines), pytrace=False)


RUN = [page for page in PAGES if any(blocks(page))]


# dynamo asks every tensor that it meets for its `grad`, also where torch warns of that (2.13)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        check(block, run(block, page, namespace), page)


# --- docs/composition.md: the table against reality ---------------------------------------------

Step = Callable[..., Any]
COMPOSITION = ROOT / "docs" / "composition.md"
SEAMS = (
    *("place", "unplace", "configure", "open", "enter", "layer", "leave"),
    *("differentiate", "evaluate", "finish"),
)
# Settings under which a transform is tried: each gives one more run of every pair with it.
RULES = {"layers.*.w": zf.Cut(0), "layers.*.b": zf.Cut(0), "layers.*.v": zf.Cut(1)}
FOLDER = tempfile.TemporaryDirectory(prefix="zfunc-composition-")
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "accumulate": [{"n": 2}],
    "drop_layers": [{"theta": 1.0}, {"theta": 0.2, "gamma": 0.7}],
    "offload": [{"to": "cpu"}, {"to": "disk", "path": FOLDER.name}],
    "pipeline": [{"microbatches": 2, "pipe": 2}],
    "quantize": [{"target_bits": 16}, {"start_bits": 6, "target_bits": 4, "period": 1}],
    "shard": [{"stage": stage} for stage in range(4)],
    "split": [{"rules": RULES, "tensor": 2}],
}
# How far numbers may be from those of the bare step: on one rank, and on the ranks of the pair.
TOLERANCES = {
    "bitwise": (0.0, 0.0),
    "rounding": (0.0, 1e-9),
    "sums": (1e-9, 1e-9),
    "16 bits": (0.08, 0.08),
}
# Transforms that make another step of it, on purpose: the law is that of the step under them.
CHANGING = {"drop_layers", "quantize"}


def table(number: int) -> tuple[list[str], dict[str, list[str]]]:
    """Column heads, and cells by row, of one of the page's tables, without the marks."""
    plain = re.sub(r"[*`]", "", COMPOSITION.read_text())
    found = re.findall(r"(?:^\|.*\|\n)+", plain, re.MULTILINE)[number]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()
    )
    return head[1:], {row[0]: row[1:] for row in rows}


HEAD, PAIRS = table(0)
tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        x = zf.scan(lambda p, x: x + torch.tanh(x @ p["w"] + p["b"]), params["layers"], x)
        return (x @ params["head"] - y).square().mean()

    return updated(loss_fn, state, batch)


def updated(loss_fn: Any, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    loss, grads = zf.value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optim.apply_updates(state.params, updates)
    state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
    return state, {"loss": loss, "grad_norm": zf.tree.global_norm(grads)}


def start() -> Any:
    def normal(*shape: int) -> torch.Tensor:
        return zf.random.normal(zf.random.key(sum(shape)), shape, dtype=torch.float64)

    layers = zf.Layers({"w": normal(8 + i, 8 + i)[:8, :8], "b": normal(8)} for i in range(3))
    return zf.TrainState.create({"layers": layers, "head": normal(8, 1)}, tx)


@functools.cache  # the bare step is what most cells are compared with
def outcome(step: Any, ranks: int, begin: Any = start) -> list[torch.Tensor]:
    """All numbers that three steps leave behind, gathered from the ranks."""
    x = zf.random.normal(zf.random.key(0), (8, 8), dtype=torch.float64)

    def run() -> Any:
        state = step.place(begin())
        for _ in range(3):
            state, metrics = step(state, step.local_batch((x, x[:, :1])))
        ours = {name: metrics[name] for name in ("loss", "grad_norm")}  # transforms add theirs
        return zf.tree.leaves((step.unplace(state), ours))

    return zf.simulate(ranks)(run)()[0]  # type: ignore[no-any-return]


def wrapped(*names: str, fn: Step = train_step) -> Iterator[tuple[Any, Any]]:
    """The bare step under these transforms, in this order, for each of their settings, and
    under those alone that change its numbers."""
    known = sorted(set(names) - {"bare"})  # the settings come in one order, however they nest
    for settings in itertools.product(*(SETTINGS.get(name, [{}]) for name in known)):
        arguments = dict(zip(known, settings, strict=True))
        step: Any = zf.Step(fn)
        alone: Any = step
        for name in names:
            step = getattr(zf, name)(step, **arguments[name]) if name in known else step
            alone = getattr(zf, name)(alone, **arguments[name]) if name in CHANGING else alone
        yield step, alone


def at_stages(*names: str, fn: Step = train_step) -> Iterator[tuple[Any, Any, range]]:
    """``wrapped``, with stages for each step: where there are several settings, they share them."""
    found = list(wrapped(*names, fn=fn))
    for turn, (step, alone) in enumerate(found):
        all_of_them = Covering.whole or len(found) == 1
        yield step, alone, range(4) if all_of_them else range(turn % 2, 4, 2)


def test_the_table_names_all_transforms():
    names = ["bare", *sorted(set(transforms.__all__) - {"pipeline", "split"})]  # these have others
    assert names == HEAD == list(PAIRS)
    assert list(table(1)[1]) == sorted(transforms.__all__)


@pytest.mark.parametrize(
    "pair", list(itertools.combinations_with_replacement(HEAD, 2)), ids="-".join
)
def test_the_cell_of(pair: tuple[str, str]):
    a, b = pair
    cell = PAIRS[a][HEAD.index(b)]
    assert cell == PAIRS[b][HEAD.index(a)], "one order is said to differ from the other"
    if cell == "raises":
        with pytest.raises(zf.CompositionError):
            list(wrapped(a, b))
        return
    near, tolerance = TOLERANCES[cell]
    for (one, alone), (other, _) in zip(wrapped(a, b), wrapped(b, a), strict=True):
        assert one == other
        expected = outcome(alone, ranks=1)
        close(outcome(one, ranks=1), expected, near)
        close(outcome(one, ranks=4 if "shard" in pair else 1), expected, tolerance)


@pytest.mark.parametrize("name", [name for name in HEAD if name != "shard"])
def test_the_cell_of_replicas_and(name: str):
    head, rows = table(2)
    assert head == [name for name in HEAD if name != "shard"]
    cell, mesh = rows["replicas"][head.index(name)], zf.mesh(replica=2, data=2)
    each = ((step, alone, stage) for step, alone, stages in at_stages(name) for stage in stages)
    for step, alone, stage in each:
        if cell == "raises":
            with pytest.raises(zf.CompositionError, match="replicas"):
                zf.shard(step, stage=stage, mesh=mesh)
            continue
        on_mesh = zf.shard(step, stage=stage, mesh=mesh)
        inside = zf.shard(zf.Step(train_step), stage=stage, mesh=mesh)
        for transform in step.transforms:
            inside = inside.wrap(transform)
        assert on_mesh == inside
        close(outcome(on_mesh, ranks=4), outcome(alone, ranks=1), TOLERANCES[cell][1])


def split_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """``train_step`` on layers of two products, which ranks share."""

    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + zf.row(torch.tanh(zf.column(x, p["w"], p["b"])), p["v"])

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        x = zf.scan(layer, params["layers"], x)
        return (x @ params["head"] - y).square().mean()

    return updated(loss_fn, state, batch)


def split_start() -> Any:
    state = start()
    layers = zf.Layers({**p, "v": p["w"].flip(0)} for p in state.params["layers"])
    return zf.TrainState.create({**state.params, "layers": layers}, tx)


# Groups of scales end where the parts of a row do: at whole rows they would be others.
BESIDE_SPLIT = SETTINGS | {
    "quantize": [{**how, "group_size": 4} for how in SETTINGS["quantize"]],
}


@pytest.mark.parametrize("name", HEAD)
def test_the_cell_of_split_and(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", BESIDE_SPLIT)
    head, rows = table(3)
    assert head == HEAD
    cell, (how,) = rows["split"][head.index(name)], SETTINGS["split"]
    for step, alone, stages in at_stages(name, fn=split_step):
        inside = zf.split(zf.Step(split_step), **how)
        for transform in step.transforms:
            inside = inside.wrap(transform)
        split = zf.split(step, **how)
        assert split == inside
        expected, tolerance = outcome(alone, 1, split_start), TOLERANCES[cell][1]
        if "to='disk'" in repr(step):
            with pytest.raises(zf.CompositionError, match="there is no shard"):
                outcome(split, 2, split_start)
        else:
            close(outcome(split, 2, split_start), expected, tolerance)
        for stage in stages if name != "shard" else ():
            close(outcome(zf.shard(split, stage=stage), 4, split_start), expected, tolerance)
        if name == "shard":
            close(outcome(split, 4, split_start), expected, tolerance)


@pytest.mark.parametrize("name", HEAD)
def test_the_cell_of_pipeline_and(name: str):
    head, rows = table(4)
    assert head == HEAD
    cell, (how,) = rows["pipeline"][head.index(name)], SETTINGS["pipeline"]
    for step, alone, stages in at_stages(name):
        if cell == "raises" or "to='disk'" in repr(step):
            with pytest.raises(zf.CompositionError):
                zf.pipeline(step, **how)
            continue
        inside = zf.pipeline(zf.Step(train_step), **how)
        for transform in step.transforms:
            inside = inside.wrap(transform)
        staged = zf.pipeline(step, **how)
        assert staged == inside
        expected, tolerance = outcome(alone, 1), TOLERANCES[cell][1]
        for stage in stages if name != "shard" else ():
            close(outcome(zf.shard(staged, stage=stage), 4), expected, tolerance)
        ranks = 4 if name == "shard" else 2
        close(outcome(staged, ranks), expected, tolerance)


def close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# Compression begins behind the first steps and needs ranks, so the cells above see none of it. Here
# it is in use; what a partner must not change are then the numbers of the compressed step.
IN_USE: tuple[dict[str, Any], ...] = (
    {"freeze_step": 2},
    {"method": "int8"},
    {"method": "powersgd", "rank": 1},
    {
        "method": "zero_one",
        "freeze_step": 3,
        "var_update_scaler": 1,
        "local_step_scaler": 1,
        "local_step_clipper": 2,
    },
)


@functools.cache
def compressed(step: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What six steps leave behind on two ranks: parameters and metrics, and all the rest."""
    x = zf.random.normal(zf.random.key(0), (8, 8), dtype=torch.float64)

    def run() -> Any:
        state = step.place(start())
        for _ in range(6):
            state, metrics = step(state, zf.local_batch((x, x[:, :1])))
        full, carried = step.unplace(state), state.aux["compress_grads"]
        errors = zf.tree.leaves(carried["worker"])
        assert any(bool(e.any()) for e in errors), "nothing was compressed"
        assert not int(carried["skipped"])
        seen = zf.tree.leaves((full.params, metrics["loss"], metrics["grad_norm"]))
        return seen, zf.tree.leaves((full.opt_state, full.aux))

    first, second = zf.simulate(2)(run)()
    for mine, theirs in zip(first, second, strict=True):
        close(mine, theirs, 0.0)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", sorted(set(HEAD) - {"bare", "compress_grads", "shard"}))
def test_beside_compression_that_is_in_use(name: str, stage: int):
    cell = PAIRS["compress_grads"][HEAD.index(name)]
    if cell == "raises":
        return
    lossy = [how for how in IN_USE if how.get("method") != "zero_one"]
    if not Covering.whole:  # at each stage one of them, another one at the next
        turn = HEAD.index(name) + stage
        lossy = [lossy[turn % len(lossy)]]
    used = [how for how in IN_USE if how in lossy or how.get("method") == "zero_one"]
    for how, settings in itertools.product(used, SETTINGS.get(name, [{}])):
        if how.get("method") == "powersgd" and name == "split":
            with pytest.raises(zf.CompositionError, match=r"a basis for each leaf"):
                zf.split(zf.compress_grads(train_step, **how), **settings)
            continue
        if how.get("method") == "zero_one" and (stage or name in ("precision", "quantize")):
            with pytest.raises(zf.CompositionError):
                getattr(zf, name)(zf.compress_grads(zf.shard(train_step, stage=stage), **how))
            continue
        # Scales are a unit's, and drop_layers keeps each layer a unit: here all settings do.
        alone = zf.compress_grads(zf.shard(train_step, stage=stage, unit_bytes=600), **how)
        beside = getattr(zf, name)(alone, **settings)
        inside = getattr(zf, name)(zf.Step(train_step), **settings)
        assert beside == zf.shard(zf.compress_grads(inside, **how), stage=stage, unit_bytes=600)
        got = compressed(beside)
        if name in CHANGING and settings != SETTINGS[name][0]:
            continue  # another step on purpose: that it runs, and alike on all ranks
        if name == "accumulate" and stage >= 2:
            continue  # each microbatch is compressed by itself
        seen, rest = compressed(alone)
        if name == "precision":  # rounding turns a sign here and there, and Adam makes much of it:
            close(got[0][-2:], seen[-2:], 2 * TOLERANCES[cell][0])  # the loss and the norm are near
        else:
            close(got[0] + got[1], seen + rest, TOLERANCES[cell][0])


@pytest.mark.parametrize("name", sorted(transforms.__all__))
def test_the_seams_of(name: str):
    (transform,) = getattr(zf, name)(train_step, **SETTINGS.get(name, [{}])[0]).transforms
    own = [s for s in SEAMS if getattr(type(transform), s) is not getattr(zf.Transform, s)]
    assert table(1)[1][name][0] == ", ".join(own)
