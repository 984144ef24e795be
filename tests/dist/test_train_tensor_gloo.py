"""``zfunc train --tensor`` on real gloo ranks: the curve of one process, also when it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

import zfunc as zf
from zfunc.commands import cli, report, training

WORDS = "--width 16 --depth 2 --heads 4 --context 16 --batch 4 --steps 4 --sample 0"


def curve(out: Path, *words: str) -> list[float]:
    text = out.parent / "text.txt"
    text.write_text("".join(f"line {i} of a small text, {i * i}.\n" for i in range(300)))
    given = ["train", "--data", str(text), "--out", str(out), *WORDS.split(), *words]
    run = cli.run_of(cli.parser().parse_args(given))
    zf.launch(training.train_rank, run, nprocs=run.ranks, timeout=120)
    rows = report.read_rows(out / "metrics.jsonl")
    return [row["loss"] for row in rows] + [rows[-1]["val_loss"]]


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_real_ranks_share_layers_and_resume_without(tmp_path: Path, ranks: str) -> None:
    one = curve(tmp_path / "one", "--ranks", "1")
    out, rest = tmp_path / "some", ["--ranks", ranks, "--tensor", "2", "--save-every", "2"]
    assert curve(out, *rest) == pytest.approx(one, rel=1e-5)
    # As if it had ended before its last checkpoint.
    (out / "checkpoints" / "step-00000004").rename(tmp_path / "later")
    assert curve(out, "--ranks", "1", "--resume") == pytest.approx(one, rel=1e-5)
