"""Checkpoints: ``save`` and ``restore`` of any placed state, by any world, bitwise.

A checkpoint is a folder of safetensors files and a manifest in JSON; nothing is pickled.
It holds the full state under dotted paths, in chunks as the ranks that wrote it owned it. A rank
that reads it takes the elements that its own placement needs.

Law: ``restore(save(place(s)))`` is ``place(s)``, bitwise, for any two placements of one
state. A checkpoint is seen only when it is complete, and every byte of it has a digest.
"""

from __future__ import annotations

import json
import math
import os
import uuid
import warnings
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfunc.engine.carried import may_lack, sort_of
from zfunc.engine.entries import Entries
from zfunc.errors import CheckpointError
from zfunc.files.background import Saving, settle, start
from zfunc.files.chunks import NAMES, check_name, digest
from zfunc.files.elements import Elements
from zfunc.files.extras import copied
from zfunc.files.folder import (
    Checkpoint,
    candidates,
    check_file,
    check_room,
    checked_count,
    clean,
    discard,
    hidden_folder,
    inspect,
    list_steps,
    passed_over,
    read_manifest,
    said,
)
from zfunc.files.inventory import Inventory, TensorLeaf, rebuilt, take_stock
from zfunc.files.locking import hold
from zfunc.files.manifest import Manifest, NewerVersion
from zfunc.files.reading import Reader
from zfunc.files.replicas import Replicas, check_replicas, look_at
from zfunc.files.saving import Task, agreed, conclude, write_now
from zfunc.ranks.axes import group
from zfunc.ranks.comm import Group
from zfunc.ranks.world import current
from zfunc.trees.tree import leaves

__all__ = ["checkpoints", "restore", "save"]

PathLike = str | os.PathLike[str]


def save(
    path: PathLike,
    state: Any,
    step: int | None = None,
    block: bool = True,
    keep: int | None = None,
    extra: Any = None,
) -> Saving:
    """Write a checkpoint of a state, placed or plain; a collective.

    Each rank writes its part, what several ranks hold once. The folder
    ``path/step-00000012`` appears when all of it is on the disk. What was there before
    stays until then, whatever happens.

    Args:
        path: a folder that all ranks see, made if need be. It belongs to one run at a
            time: its lock is held until this process ends.
        step: the number of the checkpoint; by default the state's own ``step``.
        block: return when the checkpoint is complete. Else it is written in the
            background from a copy that is taken now, in memory that is kept for the next
            time; training goes on, also under ``donate``. A later ``save`` or
            ``restore``, or the end of the program, waits for it.
        keep: how many checkpoints are to be left, this one included: those saved before
            are removed once it is complete, also ones of later steps.
        extra: a small JSON value of this rank, such as a data loader's position: ``None``,
            numbers, strings, lists and dicts. :func:`zf.extra` gives all ranks' back.

    Returns:
        A handle with ``path`` and ``wait()``, the latter a collective that raises what
        went wrong in the background.

    Raises:
        CheckpointError: the disk is full, no permission, another run writes there, ranks
            hold different states, also in what they hold in common, a leaf is nothing
            that can be written, or ``extra`` nothing that JSON can hold; or the save before
            this one has failed in the background.
        DonatedStateError: the state was given to a later one.
        ValueError: no step is known, or ``step`` or ``keep`` is no such number.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, {"w": torch.ones(3), "step": 12}).path.name
    'step-00000012'
    >>> restore(folder, like={"w": torch.zeros(3), "step": 0})
    {'w': tensor([1., 1., 1.]), 'step': 12}
    """
    keep = None if keep is None else checked_count("keep", keep, 1)  # one: this checkpoint
    settle()
    world, ranks = current(), group(None, "data")
    stock, number, seen, own = agreed(
        ranks, lambda: (*_offer(state, step), copied(extra)), label="save"
    )
    token = _same_on_all(ranks, stock, number, seen)
    root = Path(path)
    task = Task(
        root=root,
        hidden=hidden_folder(root, number, token),
        step=number,
        id=token,
        keep=keep,
        stock=stock,
        rank=ranks.rank,
        size=ranks.size,
        timeout=world.timeout,
        digests=seen.chunks,
        extra=own,
    )
    try:
        agreed(ranks, lambda: _prepare(task), label="save")
        agreed(ranks, lambda: _see(task), label="save")
        if not block:
            return agreed(ranks, lambda: start(task), label="save")
        agreed(ranks, lambda: write_now(task), label="save")
        agreed(ranks, lambda: conclude(task) if task.rank == 0 else None, label="save")
    except BaseException:
        _give_up(task)
        raise
    return Saving(task.step, task.final)


def _give_up(task: Task) -> None:
    """Leave nothing half-written behind, nor anything under way in the background."""
    if task.rank == 0:
        with suppress(OSError):
            discard(task.hidden)
    with suppress(CheckpointError):
        settle(together=False)


def _offer(state: Any, step: int | None) -> tuple[Inventory, int, Replicas]:
    stock = take_stock(state)
    for name, leaf in stock.tensors.items():
        check_name(f"{name}[0:1]")  # what a chunk of it is called
        if leaf.dtype not in NAMES:
            raise CheckpointError(
                f"{name} has dtype {leaf.dtype}, for which safetensors has no name. Save it in "
                "another dtype (torch.view_as_real for complex128)."
            )
    number = _step_of(state) if step is None else checked_count("step", step, 0)
    return stock, number, look_at(stock)


def _step_of(state: Any) -> int:
    count = Entries(state).get("step")
    if (isinstance(count, Tensor) and count.numel() == 1) or type(count) is int:
        return checked_count("step", int(count), 0)
    raise ValueError(
        f"the state ({Entries(state)}) has no entry `step` that is a number: name the checkpoint "
        "with zf.save(path, state, step=...)."
    )


def _same_on_all(ranks: Group, stock: Inventory, step: int, seen: Replicas) -> str:
    """Rank 0's random word for this save, after checking that all ranks save the same thing."""
    mine = {name: _kind(leaf) for name, leaf in stock.tensors.items()}
    mine |= {name: repr(value) for name, value in stock.static.items()}
    print_ = digest(json.dumps([step, list(mine.items())]).encode())
    offers = ranks.exchange((print_, uuid.uuid4().hex[:12], seen.summary()), label="save")
    if any(theirs != offers[0][0] for theirs, *_ in offers):
        rows = ranks.exchange({"the step": step, **mine}, label="save")
        for rank, theirs in enumerate(rows):
            for name in {**rows[0], **theirs}:
                a, b = (row.get(name, "missing") for row in (rows[0], theirs))
                if a != b:
                    raise CheckpointError(
                        f"ranks save different states: {name} is {a} on rank 0 and {b} on rank "
                        f"{rank}. All ranks save their part of one state."
                    )
        raise CheckpointError("ranks save states whose leaves come in different orders")
    check_replicas(ranks, stock, seen, [summary for *_, summary in offers], label="save")
    return str(offers[0][1])


def _prepare(task: Task) -> None:
    """Rank 0: lock the folder, clear away what was left half-done, see that there is room."""
    if task.rank:
        return
    with said(task.root):
        try:
            task.root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(
                f"{task.root}: there is a file of this name, or in the place of a folder above it. "
                "Give save the path of a folder: it makes it, and puts each checkpoint in there."
            ) from None
        if hold(task.root):
            clean(task.root)
        need = sum(leaf.nbytes for leaf in task.stock.tensors.values())
        advice = "Make room (keep=n removes old ones), or save elsewhere."
        check_room(task.root, need, f"the checkpoint needs {need:,}. {advice}")
        task.hidden.mkdir()


def _see(task: Task) -> None:
    if not task.hidden.is_dir():
        raise CheckpointError(
            f"rank {task.rank} does not see {task.hidden}, which rank 0 has just made. All ranks "
            "save into one folder: give a path on a file system that they share."
        )


def restore(path: PathLike, like: Any, step: int | None = None) -> Any:
    """Read a checkpoint into the placement of ``like``; a collective.

    The checkpoint may come from any other world, stage, unit size or tier. Each rank reads
    the chunks that its part needs, a chunk at a time.

    Args:
        path: the folder that was given to ``save``, or that of a single checkpoint.
        like: a state of the same model and optimizer, such as ``step.place(...)`` gives.
            Only its structure is used, and it is not changed.
        step: which one; by default the last saved that is good, whatever its step. Damaged
            ones are passed over with a warning.

    Returns:
        A state placed like ``like``, bitwise the one that was saved, but for what transforms
        carry that has no place there, or that the checkpoint lacks: errors of compression of
        another stage or method are dropped, and begin at zero.

    Raises:
        CheckpointError: there is none, the one asked for is damaged or of a newer
            version, or it belongs to another model (all paths that differ are listed).
        DonatedStateError: ``like`` was given to a later state.
        ValueError: ``step`` is no number of steps.
    """
    settle()
    ranks, root = group(None, "data"), Path(path)
    stock = agreed(ranks, lambda: _asked_for(like), label="restore")
    found = agreed(ranks, lambda: candidates(root, step), label="restore")
    found = ranks.exchange(found, label="restore")[0]  # one may have come or gone meanwhile
    damaged: list[str] = []
    for number, folder in found:
        state, problem = _attempt(ranks, folder, stock)
        if problem is None:
            if damaged and ranks.rank == 0:
                warnings.warn(passed_over("restored", damaged, number), stacklevel=2)
            return state
        damaged.append(f"step {number}: {problem}")
    raise CheckpointError(f"{root} has no good checkpoint. " + "; ".join(damaged))


def _asked_for(like: Any) -> Inventory:
    stock = take_stock(like)
    if any(isinstance(x, Tensor) and x.is_meta for x in leaves(like)):
        raise CheckpointError(
            "`like` lies on meta, where there is no memory to restore into. Place a state with "
            "step.place(...) or step.init(...) and give that."
        )
    return stock


def _attempt(ranks: Group, folder: Path, stock: Inventory) -> tuple[Any, str | None]:
    """The state, or why the checkpoint cannot be read; the same answer on all ranks.

    Raises:
        CheckpointError: nothing is wrong with the checkpoint, but it does not fit.
    """
    manifest: Manifest | None = None
    verdict: tuple[str, str] | None = None
    try:
        manifest = read_manifest(folder)
        for file in manifest.files[ranks.rank :: ranks.size]:
            check_file(folder, file)
        if differing := _differences(stock, manifest):
            verdict = ("misfit", f"{folder} does not fit this state. {differing}")
    except NewerVersion as error:
        verdict = ("newer", str(error))
    except CheckpointError as error:
        verdict = ("damaged", str(error))
    problem = _first(ranks, verdict)
    if problem is not None or manifest is None:
        return None, problem
    state, verdict = None, None
    try:
        with Reader(folder, manifest) as reader:
            lacking = _lacking(stock, reader)
            state = rebuilt(stock, manifest.static, partial(_fill, reader, stock), lacking)
    except CheckpointError as error:
        verdict = ("damaged", str(error))
    return state, _first(ranks, verdict)


def _first(ranks: Group, verdict: tuple[str, str] | None) -> str | None:
    """The first rank's problem, if it is damage; anything else is raised on all ranks."""
    verdicts = [v for v in ranks.exchange(verdict, label="restore") if v is not None]
    for kind, text in verdicts:
        if kind != "damaged":
            raise NewerVersion(text) if kind == "newer" else CheckpointError(text)
    return verdicts[0][1] if verdicts else None


def _differences(stock: Inventory, manifest: Manifest) -> str:
    """Every path in which a state and a checkpoint differ; empty if none does."""
    here = {**stock.tensors, **dict.fromkeys(stock.static)}
    there = {**manifest.leaves, **dict.fromkeys(manifest.static)}
    here, there = ({k: v for k, v in x.items() if not may_lack(k)} for x in (here, there))
    groups = {
        "Only in the checkpoint": [name for name in there if name not in here],
        "Only in this state": [name for name in here if name not in there],
        "Differing": [
            f"{name} ({_kind(there[name])} there, {_kind(leaf)} here)"
            for name, leaf in here.items()
            if name in there and _kind(there[name]) != _kind(leaf) and not _alike(there[name], leaf)
        ],
    }
    lines = [f"{what}: {', '.join(some)}." for what, some in groups.items() if some]
    if any(name.startswith(("aux.", "transforms.")) for name in {*here} ^ {*there}):
        lines.append(
            "In aux or transforms is what transforms of the step carry, compress_grads on two "
            "ranks or more: restore into a state that the same ones have placed (zf.simulate(2) "
            "has two ranks in one process), and unplace it there to go on without them."
        )
    return " ".join(lines)


def _lacking(stock: Inventory, reader: Reader) -> set[str]:
    """What the state has, may do without, and will not find in the checkpoint."""
    plain = {names[0]: node for node, names in stock.rows if isinstance(node, Tensor)}
    leaves = reader.manifest.leaves

    @cache
    def same(sort: str) -> bool:
        if sort not in plain or sort not in leaves:
            return True
        there = torch.empty_like(plain[sort], device="cpu")
        reader.fill(sort, Elements(0, there.numel()), there.view(-1))
        return torch.equal(there, plain[sort].cpu())

    def fits(name: str, leaf: TensorLeaf) -> bool:
        there, sort = leaves.get(name), sort_of(name)
        if there is None or not (_kind(there) == _kind(leaf) or _alike(there, leaf)):
            return False
        return sort is None or same(sort)

    return {name for name, x in stock.tensors.items() if may_lack(name) and not fits(name, x)}


def _alike(there: Any, here: Any) -> bool:
    """Whether two leaves differ in nothing but the number of ranks that have a row each."""
    each = isinstance(here, TensorLeaf) and here.each and there is not None
    return each and there.dtype == here.dtype and tuple(there.shape[1:]) == here.shape[1:]


def _fill(reader: Reader, stock: Inventory, name: str, elements: Elements, out: Tensor) -> None:
    """Elements of a leaf; of a row of another number of ranks, the mean of theirs."""
    here, there = stock.tensors[name], reader.manifest.leaves[name]
    if not here.each or there.shape[0] == here.shape[0] or not len(elements):
        reader.fill(name, elements, out)
        return
    numel = math.prod(here.shape[1:])
    own = elements.bounds[0] // numel
    row = torch.empty_like(out)
    mean = torch.zeros_like(out, dtype=torch.float64)
    for i in range(there.shape[0]):
        reader.fill(name, elements.moved((i - own) * numel), row)
        mean += row
    out.copy_(mean / there.shape[0])


def _kind(leaf: Any) -> str:
    return "no tensor" if leaf is None else f"{NAMES.get(leaf.dtype)} {list(leaf.shape)}"


def checkpoints(path: PathLike, thorough: bool = True) -> list[Checkpoint]:
    """The checkpoints in a folder, the last saved first, good or not. No collective.

    Args:
        path: the folder that was given to ``save``.
        thorough: read every byte; else only sizes, manifests and headers are checked.

    Returns:
        For each its ``step``, its ``path``, whether it is ``good`` and the ``problem``.

    Raises:
        CheckpointError: ``path`` is no folder, or cannot be read.

    >>> import tempfile
    >>> checkpoints(tempfile.mkdtemp())
    []
    """
    return [inspect(step, folder, thorough) for step, folder in list_steps(Path(path)).items()]
