"""``zfunc train --tensor``: the run of one process, whoever shares the work of a layer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc.commands import cli, report, training
from zfunc.commands.training import Run

WORDS = "--width 16 --depth 2 --heads 4 --context 16 --batch 6 --steps 6 --sample 20 --keep 3"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text, {i * i}.\n" for i in range(300)))
    return path


def run_of(text: Path, out: Path, words: str) -> Run:
    given = ["train", "--data", str(text), "--out", str(out), *WORDS.split(), *words.split()]
    return cli.run_of(cli.parser().parse_args(given))


def curve(run: Run, ranks: int) -> list[float]:
    """Losses, norms, and the last held-out loss, of simulated ranks."""
    zf.simulate(ranks)(training.train_rank)(run)
    rows = report.read_rows(run.out / "metrics.jsonl")
    return [row[name] for row in rows for name in ("loss", "grad_norm")] + [rows[-1]["val_loss"]]


@pytest.fixture(params=["float32", "float64"])
def near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """How near curves are in a dtype: in float64 of the model and of its loss."""
    if request.param == "float32":
        return 1e-5
    init = training.gpt.init

    def in_float64(*args: Any) -> Any:
        return zf.tree.map(Tensor.double, init(*args))

    monkeypatch.setattr(training.gpt, "init", in_float64)
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(F32))
    return 1e-9


F32 = torch.float32
# Of what is saved and restored; curves of one run are told in both.
in_float64 = pytest.mark.parametrize("near", ["float64"], indirect=True)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, "--tensor 2"), (6, "--tensor 3 --stage 0"), (4, "--tensor 2 --stage 2 --tied --remat")],
)
def test_ranks_that_share_layers_do_not_change_the_curve(
    text: Path, tmp_path: Path, near: float, ranks: int, words: str
) -> None:
    plain = words.replace("--tensor 2", "").replace("--tensor 3", "")
    one = curve(run_of(text, tmp_path / "one", f"--ranks 1 {plain}"), 1)
    assert curve(run_of(text, tmp_path / "some", f"--ranks {ranks} {words}"), ranks) == (
        pytest.approx(one, rel=near)
    )


@in_float64
def test_a_run_goes_on_under_another_tensor_size(text: Path, tmp_path: Path, near: float) -> None:
    """Saved by 2, resumed by 1 (and other data ranks), saved, and resumed by 2 and by 3 again."""
    whole = curve(run_of(text, tmp_path / "whole", "--ranks 1"), 1)
    words, out = "--ranks 2 --tensor 2 --save-every 2", tmp_path / "2"
    curve(run_of(text, out, words), 2)
    chain = [(2, "--tensor 1"), (4, "--tensor 2"), (3, "--tensor 3")]
    for at, (ranks, more) in zip((2, 4, 2), chain, strict=True):
        before, out = out, tmp_path / f"{out.name}-{ranks}"
        name = f"step-{at:08d}"
        shutil.copytree(before / "checkpoints" / name, out / "checkpoints" / name)
        shutil.copy(before / "metrics.jsonl", out)
        words = f"--ranks {ranks} {more} --resume --save-every 2"
        assert curve(run_of(text, out, words), ranks) == pytest.approx(whole, rel=near)
        if at == 4:  # the next one begins where this chain began, with its rows
            out = tmp_path / "2"


def test_what_a_run_says_of_its_ranks(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve(run_of(text, tmp_path / "out", "--ranks 4 --tensor 2"), 4)
    said = capsys.readouterr().out
    assert "ranks: 4 (2 share each layer), ZeRO stage 3" in said
    assert "over 2 ranks of axis 'tensor'" in said  # the description at the end
    assert said.count("a sample") == 1


def test_a_model_that_was_trained_in_parts_is_generated_from(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its low bits, too, are those of one process: groups of scales end where parts do."""
    files = []
    for ranks, more in ((1, ""), (2, "--tensor 2")):
        out = tmp_path / str(ranks)
        low = "--quantize 8 --quantize-group 4"
        curve(run_of(text, out, f"--ranks {ranks} {more} {low}"), ranks)
        words = ["--prompt", "line", "--bits", "8", "--max-new-tokens", "20"]
        capsys.readouterr()
        assert cli.main(["generate", str(out), *words]) == 0
        files.append(capsys.readouterr().out)
    assert files[0] == files[1]
