"""zfunc's stages against DDP, FSDP2 and DeepSpeed: one model, one data stream, one run.

Contestants run one after the other in freshly started ranks, round after round, and the yardstick
(the first of ``--peers``) runs again after every two others, so that each is compared with a run
of the yardstick right beside it: a shared machine may drift, neighbours in time hardly differ.

    python -m benchmarks.train_step --size small --rounds 3
    python -m benchmarks.train_step --peers ddp zfunc3 fsdp2 --size medium --steps 5
    python -m benchmarks.train_step --mode turns          # one step each in turn, in the same ranks
    python -m benchmarks.train_step --mode turns --against ../before    # another commit, too
    python -m benchmarks.train_step --mode single         # bare value_and_grad against backward()
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks import against, report, single, turns
from benchmarks.models import SIZES
from benchmarks.peers import CONTESTANTS

ROOT = Path(__file__).resolve().parents[1]
# glibc keeps freed blocks below a threshold that it raises by itself, which hides any sharding
# from the kernel's count of resident memory. Pinned, for every contestant alike.
MMAP_THRESHOLD = 1 << 20
FIXED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
Rank = subprocess.Popen[bytes]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """What every contestant runs under: one thread, this machine's loopback, and the allocator."""
    pinned = {"MALLOC_MMAP_THRESHOLD_": str(args.mmap_threshold)} if args.mmap_threshold else {}
    return {**FIXED, **pinned, **({"THP_MEM_ALLOC_ENABLE": "1"} if args.large_pages else {})}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_rank(name: str, rank: int, port: int, args: argparse.Namespace, out: Path) -> Rank:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_PORT": port}
    env = {**os.environ, **{key: str(value) for key, value in place.items()}}
    flags = {"name": name, "size": args.size, "warmup": args.warmup, "steps": args.steps}
    given = [text for key, value in flags.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "benchmarks.rank", *given, "--out", str(out)]
    with (out / f"rank{rank}.log").open("w") as log:  # the child holds a descriptor of its own
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)


def wait_for(ranks: list[Rank], seconds: float) -> int | None:
    """The first rank that failed, else the first that hangs, else None; leaves none running."""
    deadline = time.monotonic() + seconds
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
        failed = [i for i, code in enumerate(codes) if code]
        hanging = [i for i, code in enumerate(codes) if code is None]
        return next(iter(failed + hanging), None)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run(name: str, args: argparse.Namespace) -> report.Run:
    """One contestant, once, in ranks of its own.

    Raises:
        RuntimeError: A rank failed or ran past ``--timeout``; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder), free_port()
        ranks = [start_rank(name, rank, port, args, out) for rank in range(args.ranks)]
        failed = wait_for(ranks, args.timeout)
        if failed is not None:
            tail = (out / f"rank{failed}.log").read_text()[-3000:]
            raise RuntimeError(
                f"{name}: rank {failed} failed or took over {args.timeout} s\n{tail}"
            )
        seen = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(args.ranks)]
    return report.Run(name, seen)


def schedule(peers: list[str], rounds: int) -> Iterator[str]:
    """The order of runs: the yardstick first, last, and after every two of the others."""
    yardstick, *others = peers
    yield yardstick
    for _ in range(rounds):
        for i in range(0, len(others), 2):
            yield from others[i : i + 2]
            yield yardstick


def chosen_peers(asked: list[str] | None, console: Console) -> list[str]:
    """The contestants to run, without those (asked for by default) that are not installed."""
    names = asked or ["ddp", *(name for name in CONTESTANTS if name != "ddp")]
    missing = {name: CONTESTANTS[name].missing() for name in names}
    for name, package in missing.items():
        if package and asked:
            raise SystemExit(f"{name}: the package {package} is not installed here")
        if package:
            console.print(f"[dim]{name} left out: {package} is not installed here[/]")
    return [name for name in names if not missing[name]]


def compare(args: argparse.Namespace, console: Console) -> int:
    """Run the whole schedule, print the table, write the JSON; 1 if losses disagree."""
    peers = chosen_peers(args.peers, console)
    order = list(schedule(peers, args.rounds))
    runs: list[report.Run] = []
    for i, name in enumerate(order, 1):
        runs.append(run(name, args))
        console.print(f"[dim]{i}/{len(order)}[/] {name}: {runs[-1].median:.3f} s per step")
    facts = {key: value for key, value in vars(args).items() if key not in ("out", "peers")}
    record = report.record("train_step", {**facts, "environment": environment(args)}, order)
    record |= report.summarise(runs, yardstick=peers[0], tokens=args.ranks * tokens_of(args.size))
    record["runs"] = [{"name": each.name, "ranks": each.ranks} for each in runs]
    report.print_table(record, console)
    console.print(f"written: {report.write(record, args.out)}")
    return 0 if record["losses_agree"] else 1


def tokens_of(size_name: str) -> int:
    size = SIZES[size_name]
    return size.batch * size.tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--mode", choices=("ranks", "turns", "single"), default="ranks", help="default: %(default)s"
    )
    add("--size", choices=SIZES, default="small", help="default: %(default)s")
    add("--peers", nargs="+", choices=CONTESTANTS, help="yardstick first; default: all installed")
    add("--rounds", type=int, default=3, help="times that each contestant runs (%(default)s)")
    add("--warmup", type=int, default=3, help="untimed steps of each run (%(default)s)")
    add("--steps", type=int, default=8, help="timed steps of each run (%(default)s)")
    add("--ranks", type=int, default=2, help="gloo ranks, one thread each (%(default)s)")
    add(
        "--large-pages",
        action="store_true",
        help="large pages for all contestants; else only zf.init asks torch for them",
    )
    add(
        "--mmap-threshold",
        type=int,
        default=MMAP_THRESHOLD,
        metavar="BYTES",
        help="freed blocks of this size go back to the system, for all contestants (%(default)s); "
        "0: each as it comes, glibc's own rule or what zf.init chooses",
    )
    add(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="with --mode turns: another checkout of this project, whose steps take part",
    )
    add("--timeout", type=float, default=900, help="seconds for one run (%(default)s)")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=max(Console().width, 120))  # the table is wide, also into a file
    os.environ.update(environment(args))
    if args.mode == "single":
        sys.exit(single.compare(args, console))
    if args.against is not None and args.mode != "turns":
        raise SystemExit("--against compares step by step: add --mode turns")
    if args.against is not None and not (args.against / "benchmarks").is_dir():
        raise SystemExit(f"--against {args.against}: no checkout of this project is there")
    if args.against is not None:
        sys.exit(against.compare(args, chosen_peers(args.peers, console), console))
    if args.mode == "turns":
        sys.exit(turns.compare(args, chosen_peers(args.peers, console), console))
    sys.exit(compare(args, console))


if __name__ == "__main__":
    main()
