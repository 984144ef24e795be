"""``zfunc train`` goes on where it was: after the end, after SIGTERM, after a rank was killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import zfunc as zf
from tests import warm
from tests.laws.covering import Covering
from zfunc.commands import cli, report

TINY_WORDS = "--width 16 --depth 2 --heads 2 --context 16 --batch 12 --sample 0 --save-every 4"
TINY = TINY_WORDS.split()


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text, {i * i}.\n" for i in range(300)))
    return path


def words(text: Path, out: Path, *more: object) -> list[str]:
    return ["train", "--data", str(text), "--out", str(out), *TINY, *map(str, more)]


def rows(out: Path) -> list[dict[str, Any]]:
    """The rows without what the clock decides."""
    found = report.read_rows(out / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in found]


def simulated(ranks: int, command: list[str]) -> None:
    from zfunc.commands import training

    zf.simulate(ranks)(training.train_rank)(cli.run_of(cli.parser().parse_args(command)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_in_two_parts_is_the_run_in_one(stage: int, text: Path, tmp_path: Path) -> None:
    """Bitwise: the second part begins before the end of the first, whose later rows go."""
    how = ("--ranks", 2, "--stage", stage, "--steps", 12)
    simulated(2, words(text, tmp_path / "one", *how))
    simulated(2, words(text, tmp_path / "two", *how))
    folder = tmp_path / "two" / "checkpoints"
    assert [c.step for c in zf.checkpoints(folder)] == [12, 8]
    (folder / "step-00000012" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="restored step 8"):
        simulated(2, words(text, tmp_path / "two", *how, "--resume"))
    assert rows(tmp_path / "two") == rows(tmp_path / "one")
    assert [row["step"] for row in rows(tmp_path / "two")] == [*range(1, 13)]


def test_on_another_number_of_ranks_and_at_another_stage(text: Path, tmp_path: Path) -> None:
    simulated(2, words(text, tmp_path / "one", "--ranks", 2, "--steps", 12))
    before = rows(tmp_path / "one")
    (tmp_path / "one/checkpoints/step-00000012/manifest.json").unlink()
    with pytest.warns(UserWarning, match="restored step 8"):
        simulated(
            3,
            words(text, tmp_path / "one", "--ranks", 3, "--stage", 1, "--steps", 12, "--resume"),
        )
    after = rows(tmp_path / "one")
    assert after[:8] == before[:8]
    assert [row["loss"] for row in after] == pytest.approx(
        [row["loss"] for row in before], rel=2e-5
    )


def test_resuming_nothing_and_resuming_the_end(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(text, tmp_path / "out", "--ranks", 1, "--steps", 6, "--resume")
    assert cli.main(command) == 0
    first = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert len(rows(tmp_path / "out")) == 6
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == first


def test_a_new_run_does_not_mistake_an_old_ones_checkpoints_for_its_own(
    text: Path, tmp_path: Path
) -> None:
    for steps in (12, 5):
        assert cli.main(words(text, tmp_path / "out", "--ranks", 1, "--steps", steps)) == 0
    assert [c.step for c in zf.checkpoints(tmp_path / "out" / "checkpoints")] == [5, 4]
    assert [c.step for c in zf.checkpoints(tmp_path / "out" / "checkpoints.old")] == [12, 8]


def test_what_a_new_run_sets_aside_stays_until_it_has_a_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody forgot ``--resume``, stopped at once, and tries again in other ways."""
    out = tmp_path / "out"
    run = words(text, out, "--ranks", 1, "--steps", 6)
    assert cli.main(run) == 0
    first = (out / "metrics.jsonl").read_text()
    assert cli.main([*run, "--lr", "1e30"]) == 1  # ends before it saves anything
    assert "steps aside" in capsys.readouterr().err
    assert (out / "checkpoints.old" / "metrics.jsonl").read_text() == first
    assert cli.main([*run, "--lr", "1e30", "--resume"]) == 1
    assert "checkpoints.old has those of the run before" in capsys.readouterr().out
    assert cli.main([*run, "--lr", "1e30"]) == 1
    assert [c.step for c in zf.checkpoints(out / "checkpoints.old")] == [6, 4]


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def started(command: list[str], *before: str, **env: str) -> warm.Popen:
    return warm.Popen(
        [sys.executable, *before, "-m", "zfunc", *command],
        stdout=warm.PIPE, stderr=warm.STDOUT, text=True, env={**os.environ, **env},
        start_new_session=True,
    )  # fmt: skip


def test_sigterm_saves_the_last_step(text: Path, tmp_path: Path) -> None:
    """Sent to the process that was started, which passes it on to the ranks."""
    out = tmp_path / "out"
    process = started(words(text, out, "--ranks", 2, "--steps", 100_000))
    try:
        wait_for(out / "checkpoints" / "step-00000008")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    last = rows(out)[-1]["step"]
    assert process.returncode == 0, said
    assert f"asked to stop after step {last}" in said
    assert zf.checkpoints(out / "checkpoints")[0].step == last


def test_torchrun_restarts_a_killed_rank_from_the_newest_checkpoint(
    text: Path, tmp_path: Path
) -> None:
    """The job that lost a rank ends with the rows of one that did not."""
    command = words(text, tmp_path / "out", "--steps", 120, "--save-every", 20)
    agent = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 2"
    process = started(command, *agent.split())
    try:
        wait_for(tmp_path / "out" / "checkpoints" / "step-00000040")
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        said, _ = process.communicate(timeout=150)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 0, said[-3000:]
    assert [row["step"] for row in rows(tmp_path / "out")] == [*range(1, 121)]
    simulated(2, words(text, tmp_path / "whole", "--ranks", 2, "--steps", 120, "--save-every", 20))
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")


def torchrun_goes_on_with_fewer_ranks(text: Path, tmp_path: Path) -> None:
    """A node is gone with its rank; torchrun starts the other one again, alone."""
    out = tmp_path / "out"
    command = words(text, out, "--steps", 150, "--save-every", 10, "--keep", 99, "--resume")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet = f"-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 2 --rdzv-id \
        {port} --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-conf \
        last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=2,is_host".split()
    first, second = (started(command, *meet[:-1], f"{meet[-1]}={host}") for host in (1, 0))
    try:
        wait_for(out / "checkpoints" / "step-00000010")
        second.send_signal(signal.SIGSTOP)  # lest it start its rank again
        os.kill(rank_of(second.pid), signal.SIGKILL)
        second.kill()
        said, _ = first.communicate(timeout=120)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 0, said[-3000:]
    assert re.findall(r"ranks: (\d)", said)[-1] == "1"
    simulated(2, words(text, tmp_path / "whole", "--ranks", 2, "--steps", 150))
    assert [row["step"] for row in rows(out)] == [*range(1, 151)]
    assert [row["loss"] for row in rows(out)] == pytest.approx(
        [row["loss"] for row in rows(tmp_path / "whole")], rel=1e-4
    )


if Covering.whole:  # nodes take half a minute to miss each other
    test_torchrun_goes_on_with_fewer_ranks = torchrun_goes_on_with_fewer_ranks


def rank_of(agent: int, rank: int | None = None) -> int:
    """The process of a rank, or of its one rank, that torchrun has started."""
    mark = "\0RANK=" if rank is None else f"\0RANK={rank}\0"
    for entry in os.listdir("/proc"):
        try:
            if (
                entry.isdigit()
                and mark.encode() in b"\0" + Path(f"/proc/{entry}/environ").read_bytes()
            ):
                status = Path(f"/proc/{entry}/status").read_text()
                if f"PPid:\t{agent}\n" in status:
                    return int(entry)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank} under {agent}")
