"""``zf.plan``: steps foreseen, the line to write, and what is missing where none fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from zfunc import optim
from zfunc.commands.cli import main
from zfunc.foresight.sentences import sentence

pytestmark = pytest.mark.usefixtures("thawed")

TX = optim.adamw(1e-3)
SIDE = 4096


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().mean()


STEP = zf.train_step(loss, TX)
RULES = {"w": zf.Cut(1)}


def state() -> Any:
    return zf.TrainState.create({"w": torch.empty(SIDE, SIDE, device="meta")}, TX)


def rows(n: int = 64) -> torch.Tensor:
    return torch.empty(n, SIDE, device="meta")


def planned(memory: int = 40 << 30, **how: Any) -> zf.Plan:
    cluster = zf.Cluster.preset("a100-40", gpus=8, memory=memory)
    return zf.plan(lambda **given: zf.shard(STEP, **given), state, rows(), cluster, **how)


WRITTEN = {
    "shard": lambda s: zf.shard(s, stage=1, unit_bytes=1 << 20),
    "on a mesh": lambda s: zf.accumulate(zf.shard(s, mesh=zf.mesh(data=4, replica=2)), 4),
    "dtypes": lambda s: zf.precision(s, compute=torch.float16, reduce=torch.bfloat16),
    "stages": lambda s: zf.remat(zf.pipeline(s, 4, "zbv", pipe=2)),
    "rules": lambda s: zf.shard(zf.split(s, rules=RULES, tensor=2), stage=0),
    "layers": lambda s: zf.donate(zf.drop_layers(s, 0.4)),
    "host": lambda s: zf.offload(zf.shard(s), what=("opt_state",), buffers=2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_sentence_makes_the_step_again(name: str) -> None:
    step = WRITTEN[name](STEP)
    names = {"zf": zf, "torch": torch, "step": STEP, "rules": RULES}
    assert eval(sentence(step), names).transforms == step.transforms


def test_each_row_is_what_foresee_says() -> None:
    found = planned(over={"stage": [0, 3]})
    for row in found.rows:
        step = zf.shard(STEP, stage=row.given["stage"])
        seen = zf.foresee(step, state(), rows(8), ranks=8)
        assert (row.peak_bytes, row.state_bytes) == (seen.peak_bytes, seen.state_bytes)
        assert row.sent_bytes == seen.sent.total_bytes
        assert row.seconds == float(seen.time(found.cluster))


def test_the_best_is_the_fastest_that_fits() -> None:
    found = planned(over={"stage": [0, 1, 3]})
    assert len(found.rows) == 3
    assert found.best is not None and found.best.seconds == min(r.seconds for r in found.rows)
    peaks = {row.given["stage"]: row.peak_bytes for row in found.rows}
    tight = planned(int(1.05 * peaks[3]) + (2 << 30) + 4096, over={"stage": [0, 1, 3]})
    assert [row.fits for row in tight.rows] == [True, False, False]
    assert tight.best is not None and tight.best.given == {"stage": 3}


def test_what_is_missing_where_nothing_fits() -> None:
    found = planned(memory=1 << 30, over={"stage": [1, 3]})
    assert found.best is None
    least = max(row.spare_bytes for row in found.rows)
    assert least < 0 and f"{-least / 1e9:.4g} GB are missing" in found.verdict
    assert found.verdict in str(found)


def test_a_choice_that_cannot_run_is_a_row_that_says_why() -> None:
    found = planned(over={"stage": [3, 7]})
    assert [bool(row.error) for row in found.rows] == [False, True]
    assert found.rows[1].given == {"stage": 7} and "7" in found.rows[1].error


def test_a_batch_with_fewer_rows_than_ranks_is_told() -> None:
    cluster = zf.Cluster.preset("h100", gpus=8)
    found = zf.plan(lambda: zf.shard(STEP), state, rows(4), cluster)
    assert "4 rows cannot be cut over 8 ranks" in found.verdict


def test_the_rank_with_the_most_rows_counts() -> None:
    """Of 10 rows on 8 ranks the first has one, and the last two."""
    cluster = zf.Cluster.preset("a100-40", gpus=8)
    (row,) = zf.plan(lambda: zf.shard(STEP), state, rows(10), cluster).rows
    most = zf.foresee(zf.shard(STEP), state, rows(2), ranks=8, rank=7)
    assert (row.flops, row.seconds) == (most.flops.total, float(most.time(cluster)))
    assert row.peak_bytes >= most.peak_bytes


def test_an_error_without_words_is_an_error() -> None:
    def broken() -> Any:
        raise ValueError

    found = zf.plan(broken, state, rows(), zf.Cluster.preset("h100", gpus=8))
    assert (found.rows[0].error, found.verdict) == ("ValueError", "nothing can run: ValueError")


def test_what_times_rest_on_is_told() -> None:
    assert "assumed: NVIDIA A100-SXM4-40GB, from published peaks" in str(planned(over={}))


def test_rows_are_plain_in_json(tmp_path: Path) -> None:
    found = planned(over={"stage": [3], "mesh": [None, zf.mesh(replica=2)]})
    told = json.loads(found.save(tmp_path / "plan.json").read_text())
    assert [row["peak_bytes"] for row in told] == [row.peak_bytes for row in found.rows]
    assert {row["given"]["mesh"] for row in told} == {None, "mesh(replica=2, data=-1)"}


def test_scaling_is_a_plan_on_more_and_more_devices(tmp_path: Path) -> None:
    cluster = zf.Cluster.preset("a100-40", gpus=1)
    weak = zf.scale_out(zf.shard(STEP, stage=3), state, rows(), cluster, gpus=(16, 8))
    strong = zf.scale_out(zf.shard(STEP), state, rows(), cluster, (8, 16), strong=True, tokens=9)
    assert [point.samples for point in weak.points] == [64, 128]
    assert [point.samples for point in strong.points] == [64, 64]
    assert weak.points[0].seconds == strong.points[0].seconds == planned(over={}).rows[0].seconds
    assert weak.efficiency[0] == 1 > weak.efficiency[1] > strong.efficiency[1] > 0
    assert "weak scaling" in str(weak) and "tokens/s" in str(strong)
    told = json.loads(strong.save(tmp_path / "scaling.json").read_text())
    assert [point["efficiency"] for point in told["points"]] == list(strong.efficiency)


def test_scaling_is_a_picture_in_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cluster = zf.Cluster.preset("a100-40", gpus=1)
    found = zf.scale_out(zf.shard(STEP), state, rows(), cluster, (8, 128), strong=True)
    assert "64 rows cannot be cut over 128 ranks" in str(found) and found.efficiency[1] == 0
    assert found.plot(tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in found._repr_html_()


@pytest.mark.parametrize("gpus", [(), (0, 8), (8, 12)])
def test_numbers_of_devices_that_do_not_scale(gpus: Any) -> None:
    with pytest.raises(ValueError, match="expected multiples of the least"):
        zf.scale_out(zf.shard(STEP), state, rows(), zf.Cluster.preset("h100", gpus=8), gpus)


@pytest.mark.parametrize("gpus", [8, "8", (8.0,)])
def test_what_is_no_number_of_devices(gpus: Any) -> None:
    with pytest.raises(TypeError, match="expected whole numbers"):
        zf.scale_out(zf.shard(STEP), state, rows(), zf.Cluster.preset("h100", gpus=8), gpus)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({}, "give step_of"),
        ({"step_of": zf.shard, "batch": 0, "cluster": 0}, "make_state is missing"),
        ({"step_of": zf.shard, "make_state": 0, "cluster": 0}, "batch is missing"),
        ({"step_of": zf.shard, "make_state": 0, "batch": 0, "cluster": "h100"}, "is no cluster"),
        (
            {"step_of": zf.shard, "make_state": 0, "batch": 0, "over": [1]}
            | {"cluster": zf.Cluster.preset("h100", gpus=8)},
            "expected keywords of step_of",
        ),
        ({"model": 0, "batch": 0, "cluster": 0, "over": {}}, "go with step_of"),
    ],
)
def test_arguments_that_are_missing(how: Any, what: str) -> None:
    with pytest.raises(TypeError, match=what):
        zf.plan(**how)


def test_each_choice_has_values() -> None:
    cluster, over = zf.Cluster.preset("h100", gpus=8), {"stage": [1], "pipe": []}
    with pytest.raises(ValueError, match=r"'pipe'.* no values"):
        zf.plan(lambda **how: None, {}, rows(), cluster, over)


def test_a_model_needs_rows() -> None:
    cluster = zf.Cluster.preset("h100", gpus=8)
    with pytest.raises(ValueError, match="the batch has no rows"):
        zf.plan(model=zf.functionalize(torch.nn.Linear(2, 2)), batch=3, cluster=cluster)


def test_the_command_plans_a_model_of_which_there_is_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config.save_pretrained(tmp_path)
    out = tmp_path / "plan.json"
    given = ["--cluster", "h100", "--gpus", "4", "--batch", "8", "--seq", "32", "--trials", "2"]
    assert main(["plan", "--model", str(tmp_path), *given, "--json", str(out)]) == 0
    assert "best: zf." in capsys.readouterr().out
    assert len(json.loads(out.read_text())) == 2
    (tmp_path / "empty").mkdir()
    assert main(["plan", "--model", str(tmp_path / "empty"), *given]) == 1
    assert "config.json" in capsys.readouterr().err
