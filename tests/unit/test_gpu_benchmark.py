"""The benchmark of a GPU: every stage runs small on a CPU, and then says no time at all."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_ahead, gpu_compile, gpu_decode, gpu_rank, gpu_step, gpu_timing
from benchmarks.gpu_decode import decoder, packed
from benchmarks.gpu_targets import TARGETS
from zfunc import kernels
from zfunc.kernels import dispatch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    out = tmp_path_factory.mktemp("gpu")
    few = functools.partial(gpu_step.steps, contestants=["zfunc3", "zfunc3 bf16", "ddp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "steps", few)
        return gpu.main(["--dry-run", "--targets", "--out", str(out)]), out


def test_a_dry_run_reaches_every_stage_and_case(ran: tuple[int, Path]):
    status, out = ran
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert status == 0 and not any("error" in row for row in rows), rows
    done = {row["stage"] for row in rows if row["name"] == "stage"}
    assert done == set(gpu.STAGES)
    names = {row["name"] for row in rows}
    assert set(dispatch.KERNELS) <= names and "decode, w4_mm, 8 sequences" in names
    assert gpu_decode.GENERATE in names
    assert {"zfunc3, 1 rank", "zfunc3 bf16, 2 ranks", "ddp, 2 ranks", "clocks"} <= names
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
    for name in ("transforms", "correctness", "compiling"):
        monkeypatch.setattr(gpu, name, lambda *_: None)
    (tmp_path / "rows.jsonl").write_text('{"stage": "of another run"}\n')
    arguments = ["--dry-run", "--only", "optimizers", "--budget", "0", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 1
    text = capsys.readouterr().out
    assert "ERROR ceilings stage: RuntimeError: no copies today" in text
    assert "shares are of 4.3 TB/s, 780 TFLOP/s" in text and "no time left" in text
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in rows} == {"setting", *gpu.STAGES} - {"decode", "steps"}


@pytest.mark.skipif(not dispatch.installed(), reason="there is no Triton for this platform")
def test_kernels_are_compiled_for_every_target_by_their_launchers():
    """As they are launched at the sizes of the benchmark, though nothing of that size is there."""
    rows: list[dict[str, Any]] = []

    def add(stage: str, name: str, **found: Any) -> None:
        rows.append({"stage": stage, "name": name, **found})

    places = [gpu_compile.of_target(name) for name in TARGETS]
    todo = ["sample onebit_unpack", "decode w8_mm"]
    gpu_compile.ahead(add, places[:1], todo, 1, time.monotonic() + 240)
    gpu_compile.ahead(add, places[1:], todo[:1], 1, time.monotonic() + 240)
    assert [row["name"] for row in rows] == list(TARGETS), rows
    assert not any("skipped" in row or "error" in row for row in rows), rows
    assert rows[0]["kernels"] >= 10 and all(row["kernels"] for row in rows)


@pytest.mark.skipif(not dispatch.installed(), reason="there is no Triton for this platform")
def test_what_does_not_compile_or_fit_is_a_row():
    rows: list[dict[str, Any]] = []

    def add(stage: str, name: str, **found: Any) -> None:
        rows.append({"stage": stage, "name": name, **found})

    place = replace(gpu_compile.of_target("gfx90a"), shared=1)
    todo = ["sample no_kernel", "sample onebit_pack", "sample onebit_mean"]
    gpu_compile.ahead(add, [place], todo[:2], 1, time.monotonic() + 240)
    errors = [row["error"] for row in rows if "error" in row]
    assert "KeyError" in errors[0] and "bytes of shared memory" in errors[1], rows
    rows.clear()
    gpu_compile.ahead(add, [place], todo, 1, 0.0)
    assert "no time left" in rows[-1]["skipped"]


def test_shapes_computes_nothing_that_is_large():
    with gpu_ahead.Shapes():
        x = torch.randn(1 << 30)
        y = (x + 1).bfloat16().view(1 << 10, -1)
        small = torch.ones(3).sum()
        x.add_(1)
    assert y.shape == (1 << 10, 1 << 20) and y.dtype == torch.bfloat16 and small == 3


def test_what_was_timed_without_a_graph_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    times = {
        "ours": gpu_timing.Timing(1e-3, True, True),
        "torch": gpu_timing.Timing(2e-3, True, False),
    }

    class Pretended:
        real = True

        def __call__(self, call: Any, copies: int = 1, **how: Any) -> gpu_timing.Timing:
            return times[call(0)]

    run = gpu.Run(tmp_path, gpu.Size.small(), torch.device("cpu"), 0.0, frozenset())
    case = gpu.Case("a row", "adamw_flat", 1e9, lambda i: "ours", {"torch": lambda i: "torch"})
    gpu.one(run, case, Pretended(), gpu_timing.Ceilings(4e12, 1e15), 0.0)  # type: ignore[arg-type]
    (row,) = run.rows
    assert row["eager"] == ["torch"] and row["ratios"] == {"torch": 2.0}
    assert "EAGER, no graph: torch" in "\n".join(gpu.summary(run, False))


def test_candidates_do_not_name_a_gpu():
    kept = dispatch.config("w4_mm", target="sm_90")
    tried = list(gpu.candidates("w4_mm", kept))
    assert len(tried) == gpu.TRIES and {how["PROGRAMS"] for how in tried} == {2, 4}


def test_a_contestant_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    """In processes of their own, which know nothing of a contestant that is not there."""
    rows: list[dict[str, Any]] = []

    def add(stage: str, name: str, **found: Any) -> None:
        rows.append({"stage": stage, "name": name, **found})

    end = time.monotonic() + 200
    gpu_step._world(add, ["zfunc0", "no such", "torch"], 1, "tiny", "cpu", end)
    assert [row["name"] for row in rows] == ["zfunc0, 1 rank", "no such, 1 rank", "torch, 1 rank"]
    assert rows[0]["right"] and "KeyError" in rows[1]["error"] and rows[2]["right"]
    rows.clear()
    gpu_step._world(add, ["zfunc0"], 1, "tiny", "cpu", 0.0)
    assert rows == [{"stage": "steps", "name": "zfunc0, 1 rank", "skipped": "no time left"}]


def test_losses_that_differ_are_found():
    yardstick: dict[str, list[float]] = {}
    first = gpu_step._row([{"name": "zfunc0", "losses": [2.0]}], 1, "tiny", yardstick)
    other = gpu_step._row([{"name": "ddp", "losses": [2.1]}], 1, "tiny", yardstick)
    half = gpu_step._row([{"name": "ddp bf16", "losses": [2.1]}], 1, "tiny", yardstick)
    assert first["right"] and not other["right"] and half["right"]


def test_every_contestant_has_a_peer():
    names = set(gpu_rank.CONTESTANTS)
    assert {f"zfunc{stage}" for stage in range(4)} | {"torch", "ddp", "fsdp2"} <= names


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
    from zfunc.kernels.packed import Matrix, dequantized

    return dequantized(Matrix(w.data, w.scale, w.zero, w.kind, w.group or 0), w.length)


def test_the_predicted_table_in_the_docs():
    page = (ROOT / "docs" / "figures" / "gpu-predictions.md").read_text()
    found = list(gpu.predictions())
    shown = page[page.index(found[0]) :].partition("\n\n")[0].splitlines()
    assert shown == found


def test_packed_weights_are_of_their_kind():
    for kind in ("skinny_mm", "w8_mm", "w4_mm"):
        packed(kind, 10, 200, torch.device("cpu")).check(kind)
