"""The examples run as a reader would run them, in processes of their own, and do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import zfunc as zf
from tests.laws.covering import Covering

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LIMIT = 300  # seconds; each takes some ten on two idle cores


def run(name: str, *flags: str, folder: Path, before: Sequence[str] = ()) -> str:
    """What the example prints; it must end well, and leave no file behind."""
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", *before, str(EXAMPLES / name), *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir())
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """All numbers that stand where the pattern has its group."""
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


def test_every_example_is_tested():
    tested = Path(__file__).read_text()
    assert [path.name for path in SCRIPTS if f'"{path.name}"' not in tested] == []


def test_a_handwritten_loop_learns_the_spirals(tmp_path: Path):
    text = run("handwritten_loop.py", folder=tmp_path)
    assert numbers(r"accuracy ([\d.]+)%", text)[0] > 95


def test_a_contrastive_loss_on_two_ranks_is_that_of_one(tmp_path: Path):
    text = run("contrastive.py", "--steps", "21", folder=tmp_path)
    losses = numbers(r"loss ([\d.]+)", text)
    assert losses[-1] < losses[0]
    assert numbers(r"losses differ by at most ([\d.e+-]+)", text)[0] < 1e-5
    assert numbers(r"gradients differ by at most ([\d.e+-]+)", text)[0] < 1e-6


def test_llama_learns_to_repeat_and_is_cut_in_two(tmp_path: Path):
    pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    text = run("huggingface_llama.py", folder=tmp_path)
    losses = numbers(r"loss ([\d.]+)", text)
    assert losses[-1] < losses[0] / 2
    (parameters,) = numbers(r"([\d,]+) parameters", text)
    for held in numbers(r"rank \d: ([\d,]+) bytes of state", text):
        assert held == pytest.approx(12 * parameters / 2, rel=0.02)  # fp32, with Adam's moments


# Eight ranks import transformers, which takes longer than all that they do.
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"] if Covering.whole else ["zbv"])
def test_three_dimensions_lose_what_one_process_loses(tmp_path: Path, schedule: str):
    pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    flags = ("--schedule", schedule, "--steps", "3")
    text = run("three_d.py", *flags, folder=tmp_path)
    alone = ("--data", "1", "--tensor", "1", "--pipe", "1")
    one = run("three_d.py", *flags, *alone, folder=tmp_path)
    losses = numbers(r"loss ([\d.]+)", text)
    assert losses == pytest.approx(numbers(r"loss ([\d.]+)", one), abs=2e-4)
    (whole,) = numbers(r"rank 0: ([\d,]+) bytes", one)
    held = numbers(r"rank \d: ([\d,]+) bytes", text)
    assert len(held) == 8 and sum(held) == pytest.approx(whole, rel=0.03)  # tied table: twice
    for axis in ("data", "tensor", "pipe"):
        assert min(numbers(rf"{axis} ([\d,]+)", text)) > 0


@pytest.mark.parametrize("start", ["launch", "torchrun"])
def test_llama_is_shared_by_two_processes_or_run_by_one(tmp_path: Path, start: str):
    pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    before = [] if start == "launch" else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    text = run("tensor_llama.py", folder=tmp_path, before=before)
    for line in (
        "model.embed_tokens.weight: embed, 32 along dimension 0 as 16, 16",
        "self_attn.k_proj.weight: column, 32 along dimension 0 as 16, 16",
        "mlp.down_proj.weight: row, 128 along dimension 1 as 64, 64",
    ):
        assert line in text
    losses, one = numbers(r"loss ([\d.]+)", text), []
    if start == "launch":
        alone = run("tensor_llama.py", "--ranks", "1", "--tensor", "1", folder=tmp_path)
        one = numbers(r"rank 0: ([\d,]+) bytes", alone)
        assert losses == pytest.approx(numbers(r"loss ([\d.]+)", alone), abs=2e-4)
    assert losses[-1] < losses[0] / 2
    held = numbers(r"rank \d: ([\d,]+) bytes of state; sent per step: tensor", text)
    assert len(held) == 2 and all(x == pytest.approx(y / 2, rel=0.01) for x in held for y in one)


def test_a_gan_draws_the_ring(tmp_path: Path):
    text = run("gan.py", folder=tmp_path)
    radius, spread, directions = (
        numbers(pattern, text)[0]
        for pattern in (r"radius ([\d.]+)", r"± ([\d.]+) ", r"(\d+) of 12")
    )
    assert abs(radius - 2) < 0.4 and spread < 0.6 and directions >= 10


def test_a_transform_of_ones_own_sees_every_layer(tmp_path: Path):
    text = run("own_transform.py", folder=tmp_path)
    lines = text.splitlines()
    assert all(re.search(r"rms/0 [\d.]+  rms/1 [\d.]+  rms/2 [\d.]+", line) for line in lines)
    losses = numbers(r"loss ([\d.]+)", text)
    assert losses[-1] < losses[0] / 2


def test_data_go_on_where_the_checkpoint_is_on_any_number_of_ranks(tmp_path: Path):
    pytest.importorskip("torchdata", reason="the `dev` extra is not installed")
    text = run("data.py", folder=tmp_path)
    assert numbers(r"saved after (\d+) samples", text) == [60]
    resumed = re.findall(r"resumed on (\d): the same samples (\w+), losses apart by (\S+)", text)
    assert [(ranks, same) for ranks, same, _ in resumed] == [(n, "True") for n in "213"]
    assert float(resumed[0][2]) == 0 and all(float(apart) < 1e-6 for *_, apart in resumed)


def test_a_row_is_given_once_whatever_the_number_of_ranks():
    """Over the ends of epochs, and of documents shorter than a row."""
    pytest.importorskip("torchdata", reason="the `dev` extra is not installed")
    packed = runpy.run_path(str(EXAMPLES / "data.py"))["Packed"]
    texts = [bytes(range(1, 1 + n)) for n in (3, 90, 1, 40)]

    def read(state: dict[str, int] | None, batches: int) -> tuple[torch.Tensor, dict[str, int]]:
        data = packed(texts, 12, 6)
        if state is not None:
            data.load_state_dict(state)
        rows = [row for _, row in zip(range(batches), data, strict=False)]
        return torch.stack(rows), data.state_dict()

    whole, end = read(None, 9)
    assert end["samples"] == 9 * 12 and end["document"] == (whole == 0).sum()
    tokens = sorted(token for text in texts for token in [*text, 0])
    assert sorted(whole.flatten()[: len(tokens)].tolist()) == tokens  # those of the first epoch
    (_, middle), *others = zf.simulate(2)(read)(None, 4)
    assert others[0][1] == middle
    for ranks in (1, 2, 3, 6):
        found = zf.simulate(ranks)(read)(middle, 5)
        assert torch.equal(torch.cat([rows for rows, _ in found], dim=1), whole[4:])
        assert all(state == end for _, state in found)
    with pytest.raises(ValueError, match="12 rows cannot be shared equally by 5 ranks"):
        zf.simulate(5)(read)(None, 1)


def test_adapters_learn_another_text_on_a_base_that_stays(tmp_path: Path):
    pytest.importorskip("peft", reason="the `dev` extra is not installed")
    flags = ("--width", "32", "--steps", "40", "--adapt-steps", "30", "--tokens", "4")
    text = run("lora_llama.py", *flags, folder=tmp_path)
    (adapters,) = numbers(r"adapters: ([\d,]+) bytes of", text)
    after = {}
    for name in ("LoRA", "4 bits"):

        def found(what: str, name: str = name) -> float:
            return numbers(f"{name}: {what}", text)[0]

        after[name] = found(r"held-out [\d.]+ -> ([\d.]+)")
        assert after[name] < found(r"held-out ([\d.]+) ->") - 0.03
        assert f"{name}: base unchanged True" in text
        sent = found(r"a rank sent ([\d,]+) bytes of gradients")
        assert sent == pytest.approx(adapters / 2, rel=0.01)  # of adapters only, half a rank
        held = found(r"a rank held ([\d,]+) bytes")
        assert held == pytest.approx(found(r".*computed ([\d,]+)"), rel=0.01)
        assert found(r"saved ([\d,]+) bytes of adapters") == adapters
        assert f"{name}: 'The function " in text
    assert numbers(r"the saved adapters lose ([\d.]+)", text) == pytest.approx([after["LoRA"]])
    full, low = numbers(r"gathers of ([\d,]+)", text)
    assert low < full / 2


def test_loops_of_others_run_a_module_of_shards(tmp_path: Path):
    pytest.importorskip("accelerate", reason="the `dev` extra is not installed")
    loops = ["torch", "accelerate"]
    if importlib.util.find_spec("pytorch_lightning"):  # which no extra has
        loops.append("lightning")
    text = run("dtensor_module.py", "--updates", "4", "--loop", *loops, folder=tmp_path)
    for loop in loops:
        for what, most in (("losses", 1e-6), ("evaluation", 1e-5), ("norms", 1e-4)):
            assert numbers(rf"{loop}: {what} apart by (\S+)", text)[0] < most
        first, last = numbers(rf"{loop}: (?:first|last) loss ([\d.]+)", text)
        assert last < first
        own, whole = numbers(rf"{loop}: elements (?:of this rank|in all) (\S+)", text)
        assert own == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.parametrize("name", [path.name for path in SCRIPTS if "argparse" in path.read_text()])
def test_the_help_of(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    assert "--" in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat = pytest.importorskip("nbformat", reason="the `dev` extra is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the `dev` extra is not installed")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures go into the notebook
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources=resources
    ).execute()
    pictures = [
        out
        for cell in notebook.cells
        for out in cell.get("outputs", [])
        if "image/png" in out.get("data", {})
    ]
    assert len(pictures) == 2
