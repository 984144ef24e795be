"""``zfunc train --pipe``: the run of one process, whoever has which layers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.test_train_tensor import curve, in_float64, near, run_of, text
from zfunc.commands import cli

__all__ = ["near", "text"]  # fixtures

FOUR = "--depth 4 --batch 8"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--pipe 2 --microbatches 4 --schedule zbv"),
        (4, "--pipe 2 --microbatches 2 --stage 1 --tied --remat"),
        (4, "--pipe 2 --tensor 2 --microbatches 4 --schedule zb --stage 0"),
    ],
)
def test_stages_do_not_change_the_curve(
    text: Path, tmp_path: Path, near: float, ranks: int, words: str
) -> None:
    alone = " ".join(x for x in words.split() if x in ("--tied", "--remat"))
    one = curve(run_of(text, tmp_path / "one", f"{FOUR} --ranks 1 {alone}"), 1)
    some = run_of(text, tmp_path / "some", f"{FOUR} --ranks {ranks} {words}")
    assert curve(some, ranks) == pytest.approx(one, rel=near)


@in_float64
def test_a_run_goes_on_under_other_stages(text: Path, tmp_path: Path, near: float) -> None:
    """Saved by two stages, resumed by tensor ranks, then by four stages, then by one process."""
    whole = curve(run_of(text, tmp_path / "whole", f"{FOUR} --ranks 1"), 1)
    out = tmp_path / "0"
    words = "--ranks 2 --pipe 2 --schedule zbv --microbatches 4"
    curve(run_of(text, out, f"{FOUR} {words} --save-every 2"), 2)
    chain = [
        (2, "--tensor 2 --stage 1"),
        (4, "--pipe 4 --microbatches 8 --schedule 1f1b"),
        (4, "--pipe 2 --tensor 2 --microbatches 2"),
        (1, ""),
    ]
    for n, (ranks, more) in enumerate(chain):
        before, out = out, tmp_path / f"{n + 1}"
        name = f"step-{4 if n else 2:08d}"
        shutil.copytree(before / "checkpoints" / name, out / "checkpoints" / name)
        shutil.copy(before / "metrics.jsonl", out)
        words = f"{FOUR} --ranks {ranks} {more} --resume --save-every 2"
        assert curve(run_of(text, out, words), ranks) == pytest.approx(whole, rel=near)


def test_what_a_run_says_of_its_stages(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(text, tmp_path / "out", f"{FOUR} --ranks 4 --pipe 2 --tensor 2 --schedule zbv")
    assert run.microbatches == 8
    curve(run, 4)
    said = " ".join(capsys.readouterr().out.split())  # lines end where the console does
    assert "ranks: 4 (2 share each layer; 2 stages, zbv), ZeRO stage 3" in said
    assert "8 microbatches on 2 stages, zbv" in said and "rank 0 |F0a" in said
    assert said.count("a sample") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipe 2 --ranks 3", "--pipe 2 does not divide 3 ranks: expected a multiple of 2"),
        ("--pipe 2 --tensor 2 --ranks 6", "--tensor 2 with --pipe 2 does not divide 6 ranks"),
        ("--pipe 4 --depth 4 --schedule zbv --ranks 4", "takes a model apart into 8"),
        ("--pipe 2 --ranks 2 --accumulate 4", "--microbatches 4"),
        ("--pipe 2 --ranks 2 --compress int8", "--compress int8 with --pipe 2"),
        ("--pipe 2 --ranks 2 --offload disk", "--offload disk with --pipe 2"),
        ("--pipe 2 --ranks 2 --batch 12", "expected a multiple of 8, such as 16"),
        (
            "--schedule zbv --ranks 2",
            "--schedule zbv without stages, which it is for: give --pipe 2",
        ),
        ("--pipe 2 --schedule 1b1f", "invalid choice: '1b1f'"),
    ],
)
def test_flags_that_mean_nothing_together(
    text: Path, tmp_path: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", "--data", str(text), "--out", str(tmp_path), *words.split()]
    with pytest.raises(SystemExit):
        cli.main(given)
    assert message in " ".join(capsys.readouterr().err.split())
