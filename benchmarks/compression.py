"""Does compressed training end where plain training does, and for how many bytes?

    python -m benchmarks.compression --steps 1200 --seeds 0 1 2
    python -m benchmarks.compression --steps 1200 --seeds 1 --optimizers lamb   # a part of it

A byte-level GPT on the built-in corpus, ranks as processes over gloo, every run from the same
weights and batches of its seed. Writes one JSON (every loss, bytes, the machine) and a PNG of
the curves. Runs that are in the JSON are not made again, so that the whole can be done in parts, in
any order, and goes on after an interruption. The exit status is 1 where a compressed run ends more
than ``--within`` above plain.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import zfunc as zf
from benchmarks import meters
from zfunc import optim
from zfunc.commands.training import Run, make_step, validate
from zfunc.language import gpt
from zfunc.language.corpus import batch_at, read_corpus
from zfunc.language.gpt import GPTConfig

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Contest:
    """One training run.

    Attributes:
        optimizer: ``"adamw"``, ``"lamb"``, ``"momentum"`` or ``"lion"``.
        method: of ``compress_grads``, or ``"plain"``.
        freeze: steps before compression begins.
        b2: decay of second moments.
        options: of the method.
    """

    optimizer: str
    method: str
    stage: int
    seed: int
    steps: int
    freeze: int
    batch: int
    lr: float
    width: int
    depth: int
    context: int
    b2: float
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        options = "".join(f", {k}={v}" for k, v in self.options)
        return f"{self.optimizer} {self.method}, stage {self.stage}{options}"


PEAK = {"adamw": 3e-3, "lamb": 2e-2, "momentum": 3e-1, "lion": 3e-4}


def transformation(contest: Contest) -> Any:
    """The optimizer behind a clip, its rate under a warm-up and a cosine."""
    peak, warmup = contest.lr * PEAK[contest.optimizer], max(1, contest.steps // 20)
    rate = optim.warmup_cosine(peak, warmup, contest.steps, end=peak / 20, start=peak / warmup)
    made = {
        "adamw": lambda: optim.adamw(rate, b2=contest.b2, weight_decay=0.1),
        "lamb": lambda: optim.lamb(rate, b2=contest.b2, weight_decay=0.1),
        "momentum": lambda: optim.sgd(rate, momentum=0.9),
        "lion": lambda: optim.lion(rate, weight_decay=0.1),
    }[contest.optimizer]()
    return optim.chain(optim.clip_by_global_norm(1.0), made)


def train(contest: Contest) -> dict[str, Any]:
    """One run, as one rank; every rank calls this alike."""
    torch.set_num_threads(1)
    return _train(contest)


def _train(contest: Contest) -> dict[str, Any]:
    shape = GPTConfig(width=contest.width, depth=contest.depth, heads=4)
    run = Run(model=shape, context=contest.context, seed=contest.seed)
    corpus = read_corpus(run.data, context=run.context)
    tx = transformation(contest)
    step: Any = zf.donate(zf.shard(make_step(run, tx), stage=contest.stage))
    if contest.method != "plain":
        options = dict(contest.options)
        step = zf.compress_grads(step, method=contest.method, freeze_step=contest.freeze, **options)
    params = gpt.init(run.model, zf.random.key(contest.seed))
    state = step.place(zf.TrainState.create(params, tx, key=contest.seed))
    losses, sent, judged = [], [], {}
    for n in range(contest.steps):
        batch = batch_at(n, corpus.train, contest.batch, run.context, run.seed)
        with zf.comm.ledger() as led:
            state, metrics = step(state, zf.local_batch(batch))
        losses.append(float(metrics["loss"]))
        sent.append(led.total_bytes)
        if (n + 1) % -(-contest.steps // 8) == 0 or n + 1 == contest.steps:
            judged[n + 1] = validate(state.params, corpus.heldout, run, torch.device("cpu"))
    return {
        "contest": asdict(contest),
        "name": contest.name,
        "losses": losses,
        "val_losses": judged,
        "bytes": {"first": sent[0], "last": sent[-1], "all": sum(sent)},
    }


def contests(args: argparse.Namespace) -> list[Contest]:
    base = Contest(
        "adamw", "plain", 0, 0, args.steps, int(args.freeze * args.steps), args.batch, args.lr,
        args.width, args.depth, args.context, args.b2,
    )  # fmt: skip
    options = tuple((k, json.loads(v)) for k, _, v in (o.partition("=") for o in args.option))
    rows = []
    for seed, optimizer in product(args.seeds, args.optimizers):
        rows.append(replace(base, seed=seed, optimizer=optimizer))
        for method, stage in product(args.methods, args.stages):
            how = {"seed": seed, "optimizer": optimizer, "method": method, "options": options}
            rows.append(replace(base, stage=stage, **how))
    return rows


def known(path: Path) -> list[dict[str, Any]]:
    """The runs of earlier calls, which need not be made again."""
    return json.loads(path.read_text())["runs"] if path.exists() else []


def all_runs(wanted: list[Contest], ranks: int, path: Path) -> list[dict[str, Any]]:
    """What every contest came to; each run is written to the JSON when it ends."""
    rows = known(path)
    machine = {**meters.hardware(), **meters.versions(), "ranks": ranks}
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, contest in enumerate(wanted, 1):
        as_read = json.loads(json.dumps(asdict(contest)))
        if any(row["contest"] == as_read for row in rows):
            continue
        start = time.perf_counter()
        print(f"{number}/{len(wanted)}: {contest.name}, seed {contest.seed} ...", flush=True)
        row = json.loads(json.dumps(zf.launch(train, contest, nprocs=ranks)[0]))
        row["seconds"] = time.perf_counter() - start
        print(f"  val {_last(row):.4f} in {row['seconds']:.0f} s", flush=True)
        rows.append(row)
        path.write_text(json.dumps({"machine": machine, "runs": rows}))
    return rows


def table(rows: list[dict[str, Any]], within: float) -> bool:
    """Print a line for each way of training; whether all compressed ones end near plain."""
    fine = True
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        gaps, less = [], []
        for row in mine:
            plain = next((r for r in rows if _is_plain_of(r, row)), None)
            if plain is None:
                continue
            gaps.append(_last(row) / _last(plain) - 1)
            less.append(plain["bytes"]["all"] / row["bytes"]["all"])
        if not gaps:
            continue
        after = mean(row["bytes"]["first"] / row["bytes"]["last"] for row in mine)
        fine &= max(gaps) <= within
        each = " ".join(f"{gap:+.2%}" for gap in gaps)
        print(
            f"{name:34s} val {mean(map(_last, mine)):.4f}  to plain {mean(gaps):+.2%} ({each})  "
            f"bytes 1/{mean(less):.1f} in all, 1/{after:.1f} at the end"
        )
    return fine


def _is_plain_of(row: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = row["contest"], other["contest"]
    same = all(a[key] == b[key] for key in a.keys() - {"method", "stage", "options"})
    return bool(same and a["method"] == "plain")


def _last(row: dict[str, Any]) -> float:
    return float(list(row["val_losses"].values())[-1])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Training loss, smoothed over 2 % of the steps, mean over the seeds; one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    optimizers = list(dict.fromkeys(row["contest"]["optimizer"] for row in rows))
    figure, axes = pyplot.subplots(1, len(optimizers), figsize=(6 * len(optimizers), 4))
    for axis, optimizer in zip([axes] if len(optimizers) == 1 else axes, optimizers, strict=True):
        here = [row for row in rows if row["contest"]["optimizer"] == optimizer]
        for name in dict.fromkeys(row["name"] for row in here):
            curves = torch.tensor([row["losses"] for row in here if row["name"] == name])
            width = max(1, curves.shape[1] // 50)
            smooth = curves.mean(0).unfold(0, width, 1).mean(1)
            axis.plot(range(width, curves.shape[1] + 1), smooth, label=name, linewidth=1)
        axis.axvline(here[0]["contest"]["freeze"], color="grey", linestyle=":")
        axis.set(title=optimizer, xlabel="step", ylabel="nats per byte", yscale="log")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizers", nargs="+", choices=PEAK, default=["adamw", "lamb"])
    parser.add_argument("--methods", nargs="*", default=["onebit"])
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=JSON")
    parser.add_argument("--stages", type=int, nargs="+", default=[0])
    parser.add_argument("--freeze", type=float, default=0.17, help="share of the steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.0, help="factor to every peak rate")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--b2", type=float, default=0.95)
    parser.add_argument("--within", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=RESULTS / "compression.json")
    args = parser.parse_args()
    rows = all_runs(contests(args), args.ranks, args.out)
    draw(rows, args.out.with_suffix(".png"))
    return 0 if table(rows, args.within) else 1


if __name__ == "__main__":
    sys.exit(main())
