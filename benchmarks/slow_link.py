"""Training over a slow network: 1-bit Adam against plain data parallelism, DDP and PowerSGD.

    python -m benchmarks.slow_link
    python -m benchmarks.slow_link --steps 60 --rates 100mbit

Two ranks in network namespaces of their own, joined by a veth pair whose ends ``tc`` limits with a
token bucket (tbf) to 100 Mbit/s, to 1 Gbit/s, and not at all; and two ranks over the loopback.
Needs Linux, root, and iproute2; elsewhere it says so and ends. On each link all contestants take
turns, a step each, in the same two processes. Bytes are what the kernel counts on the device (over
the loopback: of both ranks). Over the loopback compression saves nothing and costs time for each
parameter, whatever the batch; there that is 2,048 bytes of text a rank in place of 256, so that a
step is nearer to what people train (``--loopback-batch``).

The exit status is 1 where, at 100 Mbit/s, 1-bit Adam trains fewer than 2.8 times the samples per
second of the uncompressed run, warm-up included, or over the loopback is over 1.1 times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.meters import hardware, versions
from benchmarks.slow_rank import MODEL, Plan

ROOT = Path(__file__).parents[1]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
RATES = ("100mbit", "1gbit", "unlimited", "loopback")
CONTESTANTS = ("zfunc", "zfunc onebit", "DDP", "DDP PowerSGD")


class Unsuitable(Exception):
    """This machine cannot make such a link; says why."""


@dataclass(frozen=True)
class End:
    """One end of a link: what to put before a command, its address's device, and rank 0's host."""

    before: tuple[str, ...]
    device: str
    host: str


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        raise Unsuitable(f"`ip {' '.join(args)}` failed: {done.stderr.strip()}")


def check() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unsuitable("network namespaces need Linux and root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unsuitable(f"{tool!r} is not installed (package iproute2)")


@contextmanager
def link(rate: str) -> Iterator[list[End]]:
    """Two ends, joined at a rate; gone afterwards, whatever happens."""
    if rate == "loopback":
        yield [End((), "lo", "127.0.0.1")] * 2
        return
    check()
    names = [f"zfunc-{os.getpid()}-{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        peer = ("peer", "name", "wire", "netns", names[1])
        ip("-n", names[0], "link", "add", "wire", "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            if rate != "unlimited":
                limit(name, rate)
        yield [End(("ip", "netns", "exec", name), "wire", ADDRESSES[0]) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def limit(name: str, rate: str) -> None:
    """Let no more than ``rate`` out of a namespace; the bucket holds 2 ms' worth at 1 Gbit/s."""
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
    command = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", *bucket]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unsuitable(f"`tc` cannot limit the link: {done.stderr.strip()}")


def free_port(ends: list[End]) -> int:
    """A port that is free where rank 0 listens; a namespace of its own has all of them."""
    if ends[0].before:
        return 29500
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def trained(rate: str, plan: Plan, limit_s: float, progress: Progress) -> list[dict[str, Any]]:
    """What both ranks saw on one link."""
    task = progress.add_task(f"{rate:10s}", total=plan.steps)
    with link(rate) as ends, tempfile.TemporaryDirectory() as folder:
        out, port, ranks = Path(folder), str(free_port(ends)), []
        for rank, end in enumerate(ends):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0" if end.before else str(rank),
                "LOCAL_WORLD_SIZE": "1" if end.before else "2",
                "MASTER_ADDR": end.host,
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": end.device,
                "OMP_NUM_THREADS": "1",
            }
            told = ["--plan", json.dumps(asdict(plan)), "--device", end.device, "--out", folder]
            command = [*end.before, sys.executable, "-m", "benchmarks.slow_rank", *told]
            pipe = subprocess.PIPE if rank == 0 else None
            ranks.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True)
            )
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                if "/" in line:
                    progress.update(task, completed=int(line.partition("/")[0]))
            end_at = time.monotonic() + limit_s
            codes = [rank.wait(max(1.0, end_at - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise RuntimeError(f"the ranks on the {rate} link ended with {codes}; see above")
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def summary(seen: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """Per contestant: the slower rank's seconds, samples per second, bytes of rank 0."""
    out = {}
    for name in plan.names:
        a, b = (rank[name] for rank in seen)
        seconds = [max(pair) for pair in zip(a["seconds"], b["seconds"], strict=True)]
        late = seconds[plan.freeze + 1 :]
        count = 2 * plan.batch
        out[name] = {
            "samples_per_s": count * plan.steps / sum(seconds),
            "samples_per_s_after": count / median(late),
            "step_s": median(late),
            "seconds": seconds,
            "wire_bytes": a["wire_bytes"],
            "ledger_bytes": a["ledger_bytes"],
            "losses": a["losses"],
            "final_loss": sum(a["losses"][-10:]) / 10,
        }
    return out


def show(results: dict[str, Any], plan: Plan, console: Console) -> None:
    table = Table(title=f"{plan.steps} steps, plain ones first: {plan.freeze}; 2 ranks")
    heads = ("link", "", "samples/s", "x zfunc", "s/step after", "KiB sent/step after", "of all")
    for i, head in enumerate((*heads, "loss")):
        table.add_column(head, justify="left" if i < 2 else "right")
    for rate, rows in results.items():
        for name, row in rows.items():
            plain = rows["zfunc"]
            late = row["wire_bytes"][plan.freeze + 1 :]
            table.add_row(
                rate,
                name,
                f"{row['samples_per_s']:.1f}",
                f"{row['samples_per_s'] / plain['samples_per_s']:.2f}",
                f"{row['step_s']:.4f}",
                f"{sum(late) / len(late) / 1024:.0f}",
                f"1/{sum(plain['wire_bytes']) / sum(row['wire_bytes']):.1f}",
                f"{row['final_loss']:.3f}",
            )
        table.add_section()
    console.print(table)


def draw(results: dict[str, Any], plan: Plan, path: Path) -> None:
    """Loss against time on the slowest link, and samples per second on every link."""
    import matplotlib

    matplotlib.use("Agg")
    import torch
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(12, 4))
    slowest = next(iter(results))
    for name, row in results[slowest].items():
        width = max(1, plan.steps // 10)
        smooth = torch.tensor(row["losses"]).unfold(0, width, 1).mean(1)
        at = torch.tensor(row["seconds"]).cumsum(0)[width - 1 :]
        curves.plot(at, smooth, label=name)
    curves.set(title=slowest, xlabel="seconds", ylabel="nats per byte")
    curves.legend()
    for i, name in enumerate(plan.names):
        heights = [rows[name]["samples_per_s"] for rows in results.values()]
        bars.bar([x + 0.2 * i for x in range(len(results))], heights, 0.2, label=name)
    bars.set_xticks([x + 0.3 for x in range(len(results))], list(results))
    bars.set(title="warm-up included", ylabel="samples per second")
    bars.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def kept(results: dict[str, Any], console: Console) -> bool:
    """Whether the promises hold, of those that were tried."""
    fine = True
    for rate, least in (("100mbit", 2.8), ("loopback", 1 / 1.1)):
        if rate in results and {"zfunc", "zfunc onebit"} <= results[rate].keys():
            rows = results[rate]
            ratio = rows["zfunc onebit"]["samples_per_s"] / rows["zfunc"]["samples_per_s"]
            word = "kept" if ratio >= least else "BROKEN"
            console.print(f"{rate}: {ratio:.2f} times the samples per second, {least:.2f}: {word}")
            fine &= ratio >= least
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--freeze", type=float, default=0.17, help="share of the steps")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--loopback-batch", type=int, default=32, help="the same over loopback")
    parser.add_argument("--rates", nargs="+", default=list(RATES), metavar="RATE",
                        help="as tc writes them, or 'unlimited', or 'loopback'")  # fmt: skip
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--limit", type=float, default=300, help="seconds for one link")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.steps < 20:
        parser.error("--steps: 20 at least")
    names = tuple(dict.fromkeys(("zfunc", *args.contestants)))
    plan = Plan(names, args.steps, max(1, int(args.freeze * args.steps)), args.batch)
    console, results, batches = Console(), {}, {}
    with Progress(console=console) as progress:
        for rate in args.rates:
            try:
                mine = replace(plan, batch=args.loopback_batch) if rate == "loopback" else plan
                results[rate] = summary(trained(rate, mine, args.limit, progress), mine)
                batches[rate] = mine.batch
            except Unsuitable as reason:
                console.print(f"{rate}: skipped: {reason}")
    if not results:
        return 0
    show(results, plan, console)
    stamp = f"slow_link-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"hardware": hardware(), "versions": versions(), "model": asdict(MODEL)}
    told = {"when": datetime.now(UTC).isoformat(timespec="seconds"), **machine}
    (args.out / f"{stamp}.json").write_text(
        json.dumps({**told, "plan": asdict(plan), "batches": batches, "links": results})
    )
    draw(results, plan, args.out / f"{stamp}.png")
    console.print(f"written: {args.out / stamp}.json and .png")
    return 0 if kept(results, console) else 1


if __name__ == "__main__":
    sys.exit(main())
