"""``zfunc train`` from the words on the command line to the files it leaves."""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

import zfunc as zf
from zfunc.commands import cli, report, training
from zfunc.commands.text_models import LOW_BIT
from zfunc.commands.training import Run
from zfunc.language import corpus
from zfunc.quant.schedules import Rules, advance, start

TINY_WORDS = "--width 16 --depth 2 --heads 2 --context 16 --batch 4 --steps 6 --sample 20"
TINY = TINY_WORDS.split()


def parsed(*words: str) -> argparse.Namespace:
    return cli.parser().parse_args(["train", *words])


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text, {i * i}.\n" for i in range(300)))
    return path


# --- words -------------------------------------------------------------------------------------


def test_no_words_are_the_default_run() -> None:
    ranks = torch.cuda.device_count() or 2
    assert cli.run_of(parsed()) == Run(ranks=ranks, batch=-(-16 // ranks) * ranks)


def test_every_flag_reaches_the_run() -> None:
    words = (
        "--ranks 4 --steps 7 --batch 8 --context 32 --seed 3 --data f.txt --out o --save-every 2 "
        "--keep 4 --resume --sample 5 --width 32 --depth 3 --heads 4 --tied --lr 0.1 --stage 1 "
        "--tensor 2 --offload disk --compress onebit --drop 0.5 --precision bf16 --remat "
        "--accumulate 2 --quantize 4 --quantize-from 8 --quantize-period 3 --quantize-group 16 "
        "--quantize-curvature"
    )
    assert cli.run_of(parsed(*words.split())) == Run(
        model=cli.GPTConfig(width=32, depth=3, heads=4, tied=True),
        data="f.txt",
        out=Path("o"),
        ranks=4,
        steps=7,
        batch=8,
        context=32,
        lr=0.1,
        seed=3,
        save_every=2,
        keep=4,
        resume=True,
        stage=1,
        tensor=2,
        offload="disk",
        compress="onebit",
        drop=0.5,
        precision="bf16",
        remat=True,
        accumulate=2,
        quantize=4,
        quantize_from=8,
        quantize_period=3,
        quantize_group=16,
        quantize_curvature=True,
        sample=5,
    )


def test_the_default_batch_splits_over_any_number_of_ranks() -> None:
    batches = [cli.run_of(parsed("--ranks", str(n))).batch for n in (1, 2, 3, 5, 16, 20)]
    assert batches == [16, 16, 18, 20, 16, 20]


def test_ranks_that_share_a_layer_have_the_same_rows() -> None:
    found = cli.run_of(parsed("--ranks", "6", "--tensor", "2"))
    assert (found.batch, found.tensor, found.mesh) == (18, 2, zf.mesh(tensor=2))
    assert torch.cuda.device_count() or cli.run_of(parsed("--tensor", "3")).ranks == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch 5 --ranks 2", "--batch 5 does not split over 2 ranks"),
        ("--batch 5 --ranks 4 --tensor 2", "--batch 5 does not split over 2 ranks of 1 micro"),
        ("--tensor 8 --ranks 8", "--tensor 8 with --heads 4: each rank needs a head"),
        ("--tensor 2 --ranks 3", "--tensor 2 does not divide 3 ranks: expected a multiple of 2"),
        ("--tensor 0", "0: expected a whole number, at least 1"),
        ("--drop 1.5", "--drop 1.5: expected a probability"),
        ("--width 30 --heads 4", "width 30 with 4 heads"),
        ("--data /no/such/file", "--data /no/such/file: no such file or directory"),
        ("--out /proc/nosuch", "--out /proc/nosuch: no such file or directory"),
        ("--out /proc/version", "--out /proc/version: a file, and no folder"),
        ("--stage 4", "invalid choice: 4"),
        ("--quantize 3", "invalid choice: 3"),
        ("--quantize 8 --quantize-from 4", "bits only fall"),
        ("--quantize-period 4", "need --quantize 8 or 4"),
        ("--steps 0", "0: expected a whole number, at least 1"),
        ("--ranks two", "two: expected a whole number, at least 1"),
        ("--lr -1", "-1: expected a number, 0 or more"),
        ("--save-every -1", "-1: expected a whole number, at least 0"),
        ("--offlaod cpu", "unrecognized arguments"),
    ],
)
def test_wrong_words_end_at_once(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", *words.split()])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "generate nosuch",
        "convert nosuch out",
        "profile --model nosuch",
    ],
)
def test_a_folder_that_is_not_there_is_named(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(words.split()) == 1
    assert "nosuch: no such file or folder" in capsys.readouterr().err


def test_it_is_named_before_arguments_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", "nosuch"])
    said = capsys.readouterr().err
    assert "--model: nosuch: no such file or folder" in said and "required" not in said


def test_no_words_are_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "usage: zfunc" in (said := capsys.readouterr().out) and "generate" in said


def test_doctor_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu" and 0 < cpu["free"] <= cpu["memory"] and cpu["kernels"]
    assert found["packages"]["torch"] == torch.__version__


def test_ranks_come_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.run_of(parsed()).ranks == 4
    with pytest.raises(ValueError, match="--ranks 2 under torchrun with 4"):
        cli.run_of(parsed("--ranks", "2"))


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    flags = (
        "ranks steps batch seed data out save-every resume stage tensor offload compress drop "
        "precision"
    )
    assert all(f"--{flag}" in said for flag in flags.split())
    assert "None" not in said


# --- rows and curves ---------------------------------------------------------------------------


def test_rows_are_on_disk_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    with report.Metrics(path) as record:
        for step in (1, 2):
            record.write(step, 1.0 / step, extra=None)
            assert [row["step"] for row in report.read_rows(path)] == [*range(1, step + 1)]
    assert report.read_rows(path)[1] == {"step": 2, "loss": 0.5, "extra": None}


def test_a_resumed_record_drops_what_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(rows) + '{"step": 4, "lo')
    assert [row["step"] for row in report.read_rows(path)] == [1, 2, 3]
    with report.Metrics(path, keep=2) as record:
        record.write(3, 0.5)
    assert [row["loss"] for row in report.read_rows(path)] == [1.0, 1.0, 0.5]


def test_a_smoothed_curve_does_not_lag() -> None:
    line = [3 - 0.01 * i for i in range(200)]
    assert report.smoothed(line) == pytest.approx(line)
    noisy = [x + (0.3 if i % 2 else -0.3) for i, x in enumerate(line)]
    inner = slice(20, -20)
    found = zip(report.smoothed(noisy)[inner], line[inner], strict=True)
    assert max(abs(a - b) for a, b in found) < 0.03


def test_a_curve_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"step": i, "loss": 3 / i, "val_loss": 3 / i if i % 4 == 0 else None} for i in range(1, 9)
    ]
    assert report.draw_curve(rows, tmp_path / "loss.png", {"bigram entropy": 2.0}) is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_no_curve_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not one step" in str(report.draw_curve([], tmp_path / "loss.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    problem = report.draw_curve([{"step": 1, "loss": 1.0}], tmp_path / "loss.png")
    assert "matplotlib is not installed" in str(problem)
    assert not (tmp_path / "loss.png").exists()


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with report.Live(Console(), start=0, steps=2, tokens=100, state="3MB/rank") as live:
        live.step(1, 2.5, val=1.5)
        assert live.step(2, 1.25, val=None) > 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1  # only the last: the first came too soon
    assert said[0].startswith("step 2/2 · loss 1.250 · state 3MB/rank · val 1.500 · ")
    assert said[0].endswith("tokens/s · 0 s left")


def test_the_first_step_is_no_measure_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 60.0, 61.0, 62.0])  # a minute to compile
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(now))
    live = report.Live(Console(), start=0, steps=10, tokens=100, every=0)
    assert [round(live.step(n, 1.0)) for n in (1, 2, 3)] == [2, 100, 100]
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "step 1/10 · loss 1.000"
    assert second.endswith("100 tokens/s · 8 s left")


# --- the run -----------------------------------------------------------------------------------


def test_a_run_leaves_rows_a_curve_and_a_verdict(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--ranks", "1", "--data", str(text), "--out", str(out), *TINY]
    assert cli.main(["train", *words]) == 0
    rows = report.read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    said = capsys.readouterr().out
    own = corpus.entropies(corpus.read_corpus(text).heldout)
    assert f"bigram entropy        {own.bigram:13.3f}" in said
    assert f"this model            {rows[-1]['val_loss']:13.3f}" in said
    assert "a sample" in said and "the step" in said


def tiny_run(text: Path, out: Path, **more: object) -> Run:
    words = ["--data", str(text), "--out", str(out), *TINY]
    for name, value in more.items():
        words += [f"--{name}", str(value)]
    return cli.run_of(parsed(*words))


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_and_stages_do_not_change_the_losses(text: Path, tmp_path: Path, stage: int) -> None:
    def losses(ranks: int) -> list[float]:
        run = tiny_run(text, tmp_path / str(ranks), ranks=ranks, stage=stage)
        zf.simulate(ranks)(training.train_rank)(run)
        rows = report.read_rows(run.out / "metrics.jsonl")
        return [row["loss"] for row in rows] + [rows[-1]["val_loss"]]

    assert losses(2) == pytest.approx(losses(1), rel=2e-5)


def test_the_held_out_loss_is_the_mean_over_every_byte(text: Path, tmp_path: Path) -> None:
    run = tiny_run(text, tmp_path, ranks=3, batch=6)
    heldout = corpus.read_corpus(text).heldout
    model = training.gpt.init(run.model, zf.random.key(1))
    moved = zf.tree.map(lambda x: x + 0.05 * torch.arange(x.shape[-1]).cos(), model)
    ids, targets = corpus.windows(heldout, run.context)
    logits = training.gpt.apply(moved, ids, run.model).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, targets.flatten())

    def judged() -> float:
        return training.validate(moved, heldout, run, torch.device("cpu"), rows=5)

    assert zf.simulate(3)(judged)() == pytest.approx([float(expected)] * 3, rel=1e-6)


def test_a_loss_that_is_no_number_names_the_step(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ranks", "1", "--data", str(text), "--out", str(tmp_path), "--lr", "1e30", *TINY]
    assert cli.main(["train", *words]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "NonFiniteError: step " in said and "give a smaller --lr (now 1e+30)" in said
    assert (tmp_path / "loss.png").exists()


def test_ctrl_c_keeps_what_was_done(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(step: int, *args: object) -> torch.Tensor:
        if step == 3:
            raise KeyboardInterrupt
        return corpus.batch_at(step, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "batch_at", interrupted)
    words = ["--ranks", "1", "--data", str(text), "--out", str(tmp_path), *TINY]
    assert cli.main(["train", *words]) == 130
    assert [row["step"] for row in report.read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "loss.png").exists()
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 500, 5000])
@pytest.mark.parametrize("target", [8, 4])
def test_the_last_bit_falls_by_the_middle_of_the_run(target: int, steps: int) -> None:
    how = training.low_bits(Run(steps=steps, quantize=target))
    rules = Rules(how["start_bits"], target, how["period"])
    schedule = start(rules, 1)
    for _ in range(max(1, steps // 2)):
        schedule = advance(schedule, rules)
    assert int(schedule["bits"]) == target
    assert how["start_bits"] == 16 or steps < 2 ** (16 - target)


def test_low_bits_are_resumed_and_exported(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped and resumed the run is the same, and ends in the file that is generated from."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def trained(out: Path, *more: str) -> str:
        words = ["--quantize", "4", "--quantize-group", "16", "--save-every", "2", *more]
        flags = ["--ranks", "1", "--data", str(text), "--out", str(out), *TINY, *words]
        assert cli.main(["train", *flags]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "(9 of 9 weights at 4 bits), in " in trained(whole, "--keep", "3")
    early = whole / "checkpoints" / "step-00000002"
    shutil.copytree(early, parts / "checkpoints" / early.name)
    trained(parts, "--resume")
    # Not the files' bytes: safetensors writes its metadata in an order that changes.
    with safe_open(parts / LOW_BIT, "pt") as one, safe_open(whole / LOW_BIT, "pt") as other:
        names = set(one.keys())
        assert one.metadata() == other.metadata() and names == set(other.keys())
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in names)
    words = ["--prompt", "line", "--bits", "4", "--max-new-tokens", "20"]
    assert cli.main(["generate", str(parts), *words]) == 0
    assert "as low-bit.safetensors has them" in capsys.readouterr().err
    late = trained(parts, "--steps", "1", "--quantize-period", "9", "--quantize-curvature")
    assert "(0 of 9 weights at 4 bits; the others need more steps, or a shorter" in late


def test_two_real_ranks(text: Path, tmp_path: Path) -> None:
    words = ["--ranks", "2", "--data", str(text), "--out", str(tmp_path), *TINY]
    ran = subprocess.run(
        [sys.executable, "-m", "zfunc", "train", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("above the bigram entropy") == 1  # only the first rank speaks
    assert len(report.read_rows(tmp_path / "metrics.jsonl")) == 6
