"""The main job: train a small GPT on real text, under any transforms. Read it as an example.

A step written by hand is a pure function of a state and a batch. What it runs under
(which ZeRO stage, which tier, which precision) is decided around it, in
:func:`transformed`; the loop in :func:`train_rank` is the same for all of them, on one
rank or many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import zfunc as zf
from zfunc import optim, quant
from zfunc.commands.report import Live, Metrics, si
from zfunc.commands.subjects import PROMPT, Subject, built_in, of_folder, verdict
from zfunc.commands.text_models import DTYPES, LOW_BIT
from zfunc.language import gpt
from zfunc.language.corpus import Corpus, batch_at, read_corpus, windows
from zfunc.language.gpt import GPTConfig
from zfunc.ranks import world
from zfunc.ranks.axes import group
from zfunc.ranks.meshes import Mesh
from zfunc.transforms.offloading.disk_trees import trees_on_disk

__all__ = ["Run", "make_step", "train_rank", "transformed", "validate"]

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """Everything that a rank needs to know about a run; the flags of ``zfunc train``."""

    model: GPTConfig = field(default_factory=GPTConfig)
    folder: Path | None = None
    data: str = "topics"
    out: Path = Path("runs/train")
    ranks: int = 2
    steps: int = 500
    batch: int = 16
    context: int = 128
    lr: float = 3e-3
    seed: int = 0
    save_every: int = 100
    keep: int = 2
    resume: bool = False
    stage: int = 3
    tensor: int = 1
    pipe: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    offload: str = "cpu"
    compress: str | None = None
    drop: float | None = None
    precision: str | None = None
    remat: bool = False
    accumulate: int = 1
    quantize: int | None = None
    quantize_from: int | None = None
    quantize_period: int | None = None
    quantize_group: int = 32
    quantize_curvature: bool = False
    sample: int = 300

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.out / "checkpoints"

    @property
    def set_aside(self) -> Path:
        """The folder of those of the run before, which this one did not resume."""
        return self.out / "checkpoints.old"

    @property
    def mesh(self) -> Mesh:
        """The ranks: those that share each layer, stages, and data over the rest."""
        return zf.mesh(tensor=self.tensor, pipe=self.pipe)


def make_step(run: Run, tx: Any, loss: Loss | None = None) -> Callable[..., Any]:
    """The training step, written by hand on plain functions; by default of the built-in GPT."""
    loss_fn = loss or partial(gpt.loss, config=run.model)

    def train_step(state: Any, batch: Tensor) -> tuple[Any, dict[str, Tensor]]:
        loss, grads = zf.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return state, {"loss": loss, "grad_norm": zf.tree.global_norm(grads)}

    return train_step


def transformed(step: Callable[..., Any], run: Run, split: Any = None) -> Any:
    """The step under the transforms that the run asks for, in whatever order.

    Args:
        split: ``split(step, tensor=)``; by default that of the built-in GPT.
    """
    step = zf.donate(zf.shard(step, stage=run.stage))
    if run.tensor > 1:
        split = split or partial(zf.split, rules=gpt.rules(run.model))
        step = split(step, tensor=run.tensor)
    if run.microbatches is not None:
        step = zf.pipeline(step, run.microbatches, run.schedule, pipe=run.pipe)
    if run.offload != "none":
        path = run.out / "offload" if run.offload == "disk" else None
        step = zf.offload(step, to=run.offload, path=path)
    if run.compress:
        # One bit needs second moments that have warmed up; integers need nothing.
        freeze = -(-run.steps * 17 // 100) if run.compress in ("onebit", "zero_one") else 0
        step = zf.compress_grads(step, method=run.compress, freeze_step=freeze)
    if run.drop is not None:
        step = zf.drop_layers(step, theta=run.drop, gamma=100 / run.steps)
    if run.precision in ("bf16", "fp16"):
        scale = "dynamic" if run.precision == "fp16" else None
        step = zf.precision(step, compute=DTYPES[run.precision], loss_scale=scale)
    if run.remat:
        step = zf.remat(step)
    if run.accumulate > 1:
        step = zf.accumulate(step, run.accumulate)
    if run.quantize:
        step = zf.quantize(step, **low_bits(run))
    return step


def low_bits(run: Run) -> dict[str, Any]:
    """What `quantize` is told; if nothing else is said, the last bit falls by the half of the run.

    Bits fall after P, 2P, 4P, ... steps, so n of them take 2**(n-1) periods. A run that is too
    short for the way from 16 bits starts at fewer.

    >>> low_bits(Run(steps=2000, quantize=8))["period"], low_bits(Run(quantize=4))["start_bits"]
    (7, 12)
    """
    target, half = run.quantize or 16, max(1, run.steps // 2)
    start = run.quantize_from or min(16, target + half.bit_length())
    period = run.quantize_period or max(1, half >> max(0, start - target - 1))
    curvature = "power_iteration" if run.quantize_curvature else None
    how: dict[str, Any] = {"group_size": run.quantize_group or None, "curvature": curvature}
    return {"start_bits": start, "target_bits": target, "period": period, **how}


def optimizer(run: Run) -> Any:
    """AdamW under a short warm-up and a cosine, gradients clipped by their global norm."""
    warmup = run.steps // 20
    start, end = run.lr / (warmup + 1), run.lr / 20
    schedule = optim.warmup_cosine(run.lr, warmup, run.steps, end=end, start=start)
    adamw = optim.adamw(schedule, b2=0.95, weight_decay=0.1)
    return optim.chain(optim.clip_by_global_norm(1.0), adamw)


def train_rank(run: Run) -> dict[str, Any]:
    """Train, as one rank of the current world; every rank calls this alike.

    Returns:
        The last row of the metrics, with ``val_loss``; {} if there was nothing to do.

    Raises:
        NonFiniteError: the loss is no longer a number.
    """
    console, device, row = Console(quiet=zf.rank() != 0, highlight=False), _device(), {}
    subject = _subject(run, device)
    corpus, tx = subject.corpus, optimizer(run)
    step = transformed(make_step(run, tx, subject.loss), run, subject.split)
    state = _begin(run, step, tx, subject, device)
    if zf.rank() == 0:
        subject.write(run.out)
    _announce(console, run, subject, state)
    saving = None
    record = Metrics(run.out / "metrics.jsonl" if zf.rank() == 0 else None, keep=int(state.step))
    tokens, size = run.batch * run.context, _size(state) + "/rank"
    live = Live(console, int(state.step), run.steps, tokens, state=size)
    with record, live, zf.preemption() as stop:
        for n in range(int(state.step), run.steps):
            batch = batch_at(n, corpus.train, run.batch, run.context, run.seed)
            state, metrics = step(state, step.local_batch(batch).to(device))
            loss = _finite(float(metrics["loss"]), n + 1, run)
            judged = (n + 1) % -(-run.steps // 8) == 0 or n + 1 == run.steps
            val_loss = _judged(state.params, subject, run, device) if judged else None
            speed = live.step(n + 1, loss, val=val_loss)
            more = {"grad_norm": float(metrics["grad_norm"]), "tokens_per_second": round(speed, 1)}
            row = record.write(n + 1, loss, val_loss=val_loss, **more)
            stopping = stop()
            if run.save_every and ((n + 1) % run.save_every == 0 or n + 1 == run.steps or stopping):
                saving = zf.save(run.checkpoints, state, step=n + 1, block=stopping, keep=run.keep)
            if stopping:
                console.print(f"asked to stop after step {n + 1}")
                return row
    _conclude(console, run, step, state, subject, row)
    if saving is not None:
        saving.wait()  # the run has not ended well unless its last checkpoint is there
    return row


def _subject(run: Run, device: torch.device) -> Subject:
    if run.folder is not None:
        return of_folder(run.folder, run.data, run.context, run.seed, device)
    corpus = read_corpus(run.data, context=run.context)
    return built_in(run.model, corpus, run.context, run.seed)


def _begin(run: Run, step: Any, tx: Any, subject: Subject, device: torch.device) -> Any:
    params = zf.tree.map(lambda x: x.to(device), subject.init())
    state = step.place(zf.TrainState.create(params, tx, key=run.seed))
    if run.resume and run.checkpoints.exists() and zf.checkpoints(run.checkpoints, thorough=False):
        state = zf.restore(run.checkpoints, like=state)
    return state


def _size(state: Any) -> str:
    on_disk = sum(node.nbytes for node in trees_on_disk(state).values())
    in_memory = f"{si(zf.tree.size_bytes(state))}B"
    return f"{in_memory} + {si(on_disk)}B on disk" if on_disk else in_memory


def _device() -> torch.device:
    alone = zf.world_size() == 1 and torch.cuda.is_available()
    return torch.device("cuda") if alone else world.current().device


def _finite(loss: float, step: int, run: Run) -> float:
    if math.isfinite(loss):
        return loss
    raise zf.NonFiniteError(
        f"step {step}: the loss is {loss}, expected a finite number; "
        f"give a smaller --lr (now {run.lr:g})"
    )


def _judged(params: Any, subject: Subject, run: Run, device: torch.device) -> float:
    return validate(params, subject.corpus.heldout, run, device, score=subject.score)


def validate(
    params: Any,
    text: Tensor,
    run: Run,
    device: torch.device,
    rows: int = 64,
    score: Callable[..., Tensor] | None = None,
) -> float:
    """Mean loss over a whole text, in nats per byte or token; ranks score their shares of it.

    Args:
        params: placed parameters, or full ones.
        text: 1-D ids, the same on all ranks.
        run: the run.
        device: where the parameters live.
        rows: windows scored at once.
        score: ``score(params, ids, targets)``, a sum; by default that of the built-in GPT.

    Returns:
        The same number on all ranks, over every id but the first.
    """
    score = score or partial(gpt.score, config=run.model)
    on = run.mesh.closed(zf.world_size())
    every = windows(text, run.context, multiple=on.size("data"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    mine = (zf.local_batch(part, on).split(rows) for part in every)
    for ids, targets in zip(*mine, strict=True):
        total += zf.evaluate(score)(params, ids.to(device), targets.to(device))
    summed = group(on, "data").all_reduce(total, label="held-out loss").wait()
    return float(summed) / (len(text) - 1)


def _announce(console: Console, run: Run, subject: Subject, state: Any) -> None:
    corpus = subject.corpus
    console.print(
        f"[bold]zfunc train[/bold]: {si(subject.count)} parameters, "
        f"ranks: {zf.world_size()}{_shared(run)}, ZeRO stage {run.stage}, "
        f"{_size(state)} of state per rank\n"
        f"{escape(corpus.name)}: {len(corpus.train):,} {subject.unit}s to train on, "
        f"{len(corpus.heldout):,} held out"
    )
    if run.resume and not int(state.step) and run.set_aside.exists():
        told = f"{run.checkpoints} has none to resume from; {run.set_aside} has those of the run "
        console.print(escape(f"{told}before. To go on with them, rename it."), soft_wrap=True)


def _shared(run: Run) -> str:
    told = [f"{run.tensor} share each layer"] if run.tensor > 1 else []
    told += [f"{run.pipe} stages, {run.schedule}"] if run.pipe > 1 else []
    return f" ({'; '.join(told)})" if told else ""


def _conclude(
    console: Console, run: Run, step: Any, state: Any, subject: Subject, row: dict[str, Any]
) -> None:
    """Say what the run reached. Collective: all ranks gather, the first one speaks."""
    if not row:
        console.print(f"nothing to do: {escape(str(run.out))} is at step {int(state.step)} already")
        return
    params = zf.full(state.params)
    console.print(verdict(row["val_loss"], subject))
    if run.quantize:
        console.print(_export(run, step, state, subject.corpus))
    if subject.export is not None:
        console.print(escape(subject.export(run.out, params)), soft_wrap=True)
    if zf.rank() == 0 and run.sample:
        console.print(f"\n[bold]a sample[/bold], after {PROMPT} {subject.unit}s of held-out text")
        console.print(subject.sample(params, run.sample, run.seed), soft_wrap=True)
    console.print(f"\n[bold]the step[/bold]\n{escape(step.describe())}")


def _export(run: Run, step: Any, state: Any, corpus: Corpus) -> str:
    """Write the rounded model that ``zfunc generate --bits`` loads. Collective."""
    low = quant.exported(step, state)
    loss = validate(quant.dequantize_tree(low), corpus.heldout, run, _device())
    if zf.rank() == 0:
        quant.save(run.out / LOW_BIT, zf.tree.map(lambda x: x.cpu(), low))
    bits = state.aux["quantize"]["bits"]
    at = f"{int((bits == run.quantize).sum())} of {len(bits)} weights at {run.quantize} bits"
    late = "; the others need more steps, or a shorter --quantize-period"
    at += "" if bool((bits == run.quantize).all()) else late
    return f"with rounded weights  {loss:13.3f}   ({at}), in {escape(str(run.out / LOW_BIT))}"
