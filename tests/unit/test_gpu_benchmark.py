"""The benchmark of a GPU: every stage runs small on a CPU, and then says no time at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_decode
from benchmarks.gpu_decode import decoder, packed
from zfunc import kernels
from zfunc.kernels import dispatch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    out = tmp_path_factory.mktemp("gpu")
    return gpu.main(["--dry-run", "--out", str(out)]), out


def test_a_dry_run_reaches_every_stage_and_case(ran: tuple[int, Path]):
    status, out = ran
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert status == 0 and not any("error" in row for row in rows), rows
    done = {row["stage"] for row in rows if row["name"] == "stage"}
    assert done == set(gpu.STAGES)
    names = {row["name"] for row in rows}
    assert set(dispatch.KERNELS) <= names and "decode, w4_mm, 8 sequences" in names
    assert gpu_decode.GENERATE in names
    assert all(row["right"] for row in rows if "right" in row)
    assert json.loads((out / "dry-run.json").read_text()) == {}


def test_it_calls_no_time_of_a_cpu_a_gpus(ran: tuple[int, Path]):
    _, out = ran
    said = (out / "summary.txt").read_text()
    assert "no figure is a GPU's" in said
    assert " us " not in said and "TB/s" not in said and "%" not in said
    assert not any("microseconds" in line for line in (out / "rows.jsonl").read_text().splitlines())


def test_a_stage_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(*_: Any) -> Any:
        raise RuntimeError("no copies today")

    monkeypatch.setattr(gpu, "ceilings", fails)
    for name in ("transforms", "correctness"):
        monkeypatch.setattr(gpu, name, lambda *_: None)
    (tmp_path / "rows.jsonl").write_text('{"stage": "of another run"}\n')
    arguments = ["--dry-run", "--only", "optimizers", "--budget", "0", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 1
    text = capsys.readouterr().out
    assert "ERROR ceilings stage: RuntimeError: no copies today" in text
    assert "shares are of 4.3 TB/s, 780 TFLOP/s" in text and "no time left" in text
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in rows} == {"setting", *gpu.STAGES} - {"decode"}


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert gpu.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["w8_mm", "w4_mm"])
def test_a_fused_token_is_that_of_plain_operations(kind: str):
    """With low-bit weights, too: the decoder of plain weights gets what they stand for."""
    size = gpu.Size.small()
    model = decoder(kind, size, 2, torch.device("cpu"))
    plain = [tuple(_plain(w) for w in row) for row in model.matrices]
    other = decoder("skinny_mm", size, 2, torch.device("cpu"))
    for row, theirs in zip(plain, other.matrices, strict=True):
        for w, held in zip(row, theirs, strict=True):
            held.data.copy_(w)
    for name in ("cos", "sin"):
        getattr(other, name).copy_(getattr(model, name))
    x = torch.randn(2, size.width).bfloat16()
    found, expected = model.fused(x), other.plain(x)
    assert (found - expected).float().norm() < 0.03 * expected.float().norm()
    for mine, theirs in ((model.keys, other.keys), (model.values, other.values)):
        assert (mine - theirs).float().norm() < 0.03 * theirs.float().norm()


def _plain(w: kernels.Packed) -> torch.Tensor:
    from zfunc.kernels.packed import dequantized

    return dequantized(w.data, w.scale, w.zero, w.kind, w.group or 0, w.length)


def test_the_predicted_table_in_the_docs():
    page = (ROOT / "docs" / "kernels.md").read_text()
    found = list(gpu.predictions())
    shown = page[page.index(found[0]) :].partition("\n\n")[0].splitlines()
    assert shown == found


def test_packed_weights_are_of_their_kind():
    for kind in ("skinny_mm", "w8_mm", "w4_mm"):
        packed(kind, 10, 200, torch.device("cpu")).check(kind)
