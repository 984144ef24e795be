"""``Foreseen.time``: rows on clocks, by hand; and the clusters that they are for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.laws.foreseen_steps import CLIPPED, STEPS, batch, loss
from zfunc.errors import DeviceError
from zfunc.foresight.clocks import replay, replay_stages
from zfunc.foresight.clusters import Cluster
from zfunc.foresight.rows import StepRow
from zfunc.transforms.offloading.blocks import Files

pytestmark = pytest.mark.usefixtures("thawed")

# One second is a byte of memory, and so it is of a link: two ranks send half of what they gather.
PLAIN = Cluster(
    device="by hand",
    gpus=2,
    memory=1,
    peak_flops={"float32": 1.0},
    memory_bandwidth=1.0,
    multiprocessors=1,
    nvlink=0.5,
    nic=0.0,
    pcie=0.0,
    stream=1.0,
    link_share=1.0,
    gap=0.0,
    dispatch=0.0,
    latency=0.0,
    hop=0.0,
)
GROUPS = {"data": (0, 1)}
GATHER = StepRow("start", "all_gather", written=4, axis="data", number=1)
WAIT = StepRow("wait", "all_gather", axis="data", number=1)


def product(seconds: int) -> StepRow:
    return StepRow("compute", "copy_", read=seconds)


def parts(*rows: StepRow, on: Cluster = PLAIN) -> dict[str, float]:
    took = replay(rows, on, GROUPS)
    assert sum(took.parts.values()) == pytest.approx(float(took))
    return dict(took.parts)


def test_products_in_float32_are_those_of_tf32_where_torch_takes_it() -> None:
    """As torch is told when the time is asked for; on the CPU nothing changes."""
    w = torch.empty(4096, 4096, device="meta")
    step = zf.train_step(lambda p, x: (x @ p["w"]).square().mean(), zf.optim.sgd(0.1))
    state = zf.TrainState.create({"w": w}, zf.optim.sgd(0.1))
    told = zf.foresee(step, state, torch.empty(4096, 4096, device="meta"), ranks=1)
    clusters = [Cluster.preset(name, gpus=1, dispatch=0, gap=0) for name in ("h100", "v100")]
    plain = [told.time(cluster).busy["compute"] for cluster in clusters]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        fast = [told.time(cluster).busy["compute"] for cluster in clusters]
    finally:
        torch.set_float32_matmul_precision(before)
    assert fast[0] < plain[0] / 3 and fast[1] == plain[1]  # a V100 has none


def test_attention_with_and_without_a_causal_mask_take_their_own_time() -> None:
    """Of the same shape and in one step: whichever comes first."""
    q = torch.empty(4, 16, 4096, 64, device="meta", dtype=torch.bfloat16)

    def seconds(*masks: bool) -> float:
        def step(state: Any, q: torch.Tensor) -> Any:
            attend = torch.nn.functional.scaled_dot_product_attention
            return state, [attend(q, q, q, is_causal=masked) for masked in masks]

        told = zf.foresee(step, {"params": {}}, q, ranks=1)
        return told.time(Cluster.preset("h100", gpus=1)).parts["compute"]

    assert seconds(True, False) == pytest.approx(seconds(False, True))
    assert seconds(True, False) == pytest.approx(seconds(True) + seconds(False))
    assert seconds(True) < 0.7 * seconds(False)


def test_a_layer_of_attention_with_its_projections_takes_the_time_of_its_parts() -> None:
    """The kernel that a module without gradients takes is mostly products, whatever its name."""
    layer = torch.nn.MultiheadAttention(1024, 16, batch_first=True).eval()

    def seen(gradients: bool) -> Any:
        def step(state: Any, x: torch.Tensor) -> Any:
            with torch.set_grad_enabled(gradients):
                return state, layer(x, x, x, need_weights=False)[0]

        return zf.foresee(step, {"params": {}}, torch.empty(4, 2048, 1024), ranks=1)

    cluster, whole, parts = Cluster.preset("h100", gpus=1), seen(False), seen(True)
    assert [row.name for row in whole.rows] == ["_native_multi_head_attention"]
    assert whole.flops.total == parts.flops.total
    assert 0.3 < float(whole.time(cluster)) / float(parts.time(cluster)) < 1


def test_a_collective_runs_beside_two_products() -> None:
    """Of its 4 s, 3 are beside the second product."""
    took = replay([product(2), GATHER, product(3), WAIT, product(1)], PLAIN, GROUPS)
    assert (took.seconds, took.parts) == (7.0, {"compute": 6.0, "communication": 1.0})
    assert [span[3:] for span in took.lanes] == [(0, 2), (2, 4), (2, 3), (6, 1)]
    assert took.busy == {"compute": 6.0, "node": 4.0} and took.binds == "compute"


def test_what_is_waited_for_at_once_is_beside_nothing() -> None:
    assert parts(product(2), GATHER, WAIT, product(3)) == {"compute": 5.0, "communication": 4.0}


def test_collectives_of_one_link_take_turns() -> None:
    second = replace(GATHER, number=2)
    assert replay([GATHER, second, product(5)], PLAIN, GROUPS).seconds == 8.0


def test_what_nobody_waits_for_has_to_end_too() -> None:
    assert parts(product(1), GATHER) == {"compute": 1.0, "communication": 4.0}


def test_a_device_waits_for_a_slow_host() -> None:
    slow = replace(PLAIN, dispatch=2.0)
    assert parts(product(1), product(1), on=slow) == {"compute": 2.0, "host": 3.0}
    assert replay([product(1)] * 2, replace(slow, kind="cpu"), GROUPS).seconds == 6.0


def test_a_sum_for_all_goes_around_twice() -> None:
    assert parts(replace(GATHER, name="all_reduce")) == {"communication": 8.0}


def test_whoever_sends_a_message_does_not_wait() -> None:
    sent = replace(GATHER, name="send")
    got = replace(GATHER, name="receive")
    over = [replace(WAIT, name=name) for name in ("send", "receive")]
    assert parts(sent, over[0], product(9)) == {"compute": 9.0}
    assert parts(got, over[1], product(9)) == {"communication": 8.0, "compute": 9.0}


def test_ranks_of_a_node_share_its_way_out() -> None:
    """Four ranks in two nodes: half of the bytes come in through the two of a node together."""
    four = replace(PLAIN, gpus=4, gpus_per_node=2, nic=0.25, network_hop=0.0)
    took = replay([GATHER], four, {"data": (0, 1, 2, 3)})
    assert took.seconds == 4.0 and took.lanes[0].lane == "network"
    assert replay([GATHER], four, {"data": (0, 2)}).seconds == 8.0


def test_a_node_with_fewer_ranks_has_fewer_ways_out() -> None:
    """Three ranks, two of them in a node: what those have comes to the third through one link."""
    three = replace(PLAIN, gpus=3, gpus_per_node=2, nic=0.25, network_hop=0.0)
    took = replay([replace(GATHER, written=3)], three, {"data": (0, 1, 2)})
    assert took.seconds == 2 / 0.25


def test_what_is_for_each_rank_goes_out_through_a_link_of_its_own() -> None:
    """Half of it to the other node, four bytes a second; a broadcast is as long as it is."""
    four = replace(PLAIN, gpus=4, gpus_per_node=2, nic=0.25, network_hop=0.0)
    each = replace(GATHER, name="all_to_all")
    assert replay([each], four, {"data": (0, 1, 2, 3)}).seconds == 2 / 0.25
    assert replay([each], PLAIN, GROUPS).seconds == 4.0
    assert replay([replace(GATHER, name="broadcast")], PLAIN, GROUPS).seconds == 8.0


def test_a_step_that_does_nothing_takes_no_time() -> None:
    took = replay([], PLAIN, GROUPS)
    assert (took.seconds, took.binds) == (0.0, "nothing") and "bound by nothing" in str(took)


# Copies and drives

HOST = replace(PLAIN, pcie=2.0, drive_read=1.0, drive_write=0.5, host_memory_bandwidth=1.0)


def move(way: str, nbytes: int, number: int, after: int = 0) -> StepRow:
    return StepRow("start", way, written=nbytes, label=way, number=number, after=after)


def over(way: str, number: int) -> StepRow:
    return StepRow("wait", way, label=way, number=number)


def test_copies_and_drives_run_beside_the_device() -> None:
    """A unit is read in 4 s and goes up in 2, while 3 s are computed."""
    rows = [move("read", 4, 1), move("up", 4, 2, after=1), product(3), over("up", 2), product(1)]
    took = replay(rows, HOST, GROUPS)
    assert took.parts == {"compute": 4.0, "copies": 3.0}
    assert took.busy == {"read": 4.0, "up": 2.0, "compute": 4.0}


def test_what_goes_down_was_computed_before_and_is_written_behind_that() -> None:
    took = replay([product(3), move("down", 2, 1), move("write", 2, 2, after=1)], HOST, GROUPS)
    assert took.parts == {"compute": 3.0, "copies": 1.0, "drives": 4.0}


def test_the_host_computes_once_what_it_reads_is_there() -> None:
    """And the device, which has nothing left, stands."""
    update = StepRow("compute", "copy_", read=2, on_host=True)
    took = replay([move("read", 3, 1), product(1), over("read", 1), update], HOST, GROUPS)
    assert took.parts == {"compute": 1.0, "drives": 2.0, "host": 2.0}
    assert replay([update], replace(PLAIN, kind="cpu"), GROUPS).seconds == 2.0


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (move("up", 1, 1), "pcie"),
        (move("read", 1, 1), "drive_read"),
        (move("write", 1, 1), "drive_write"),
        (StepRow("compute", "add", read=1, on_host=True), "host_memory_bandwidth"),
    ],
)
def test_what_an_offloaded_state_needs_is_named(row: StepRow, field: str) -> None:
    with pytest.raises(DeviceError, match=f"give {field}= in bytes per second"):
        replay([row], PLAIN, GROUPS)


def test_a_disk_reads_and_writes_what_it_really_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a steady step; on a GPU parameters go up besides, and gradients down."""
    real: Counter[str] = Counter()
    for way in ("read", "write"):
        old = getattr(Files, way)

        def counted(self: Any, region: Any, block: int, data: Any, way=way, old=old) -> int:
            real[way] += len(data)
            return int(old(self, region, block, data))

        monkeypatch.setattr(Files, way, counted)

    def step(path: str) -> Any:
        return zf.offload(STEPS["plain"].step(3, 1), to="disk", path=tmp_path / path)

    running = step("real")
    state, _ = running(running.place(STEPS["plain"].state()), batch(1))
    real.clear()
    running(state, batch(1))
    told = {}
    for device in ("cpu", "cuda"):
        seen = zf.foresee(step("told"), STEPS["plain"].state(), batch(1), ranks=1, device=device)
        told[device] = Counter[str]()
        for row in seen.rows:
            if row.kind == "start":
                told[device][row.name] += row.written
    assert told["cpu"] == real
    params = sum(x.nbytes for x in zf.tree.leaves(STEPS["plain"].state().params))
    up, down = (told["cuda"].pop(way) / params for way in ("up", "down"))
    assert told["cuda"] == real and 1.5 < up <= 2.1 and 1 <= down < 1.1
    assert not (tmp_path / "told").exists()


def test_an_optimizer_on_the_host_leaves_the_devices_memory() -> None:
    """Its state is not counted there, and only gradients and parameters cross."""
    step = STEPS["offload"].step(1, 2)
    seen = zf.foresee(step, STEPS["offload"].state(), batch(1), ranks=2)
    plain = zf.foresee(STEPS["plain"].step(1, 2), STEPS["plain"].state(), batch(1), ranks=2)
    params = sum(x.nbytes for x in zf.tree.leaves(STEPS["plain"].state().params))
    assert plain.peak_bytes - seen.peak_bytes > 0.9 * params  # two moments, of which half is here
    crossed = [row.written for row in seen.rows if row.name == "up" and row.kind == "start"]
    assert params / 2 <= sum(crossed) <= 1.1 * params / 2


# Stages


def test_stages_wait_for_what_their_neighbours_really_take() -> None:
    """The first computes for 1 s and sends for 2; the second has 5 s of its own, and sends back."""
    pipe, send = {"pipe": (0, 1)}, replace(GATHER, name="send", axis="pipe", written=1)
    sent, got = replace(send, peer=1), replace(send, name="receive", peer=1, number=2)
    there = replace(WAIT, name="receive", axis="pipe", number=2)
    first = [product(1), sent, got, there, product(1)]
    mine, back = replace(got, peer=0), replace(send, peer=0, number=3)
    second = [mine, there, product(5), back]
    one, two = replay_stages([(first, pipe), (second, pipe)], PLAIN, "pipe")
    assert one.parts == {"compute": 2.0, "stages": 7.0, "communication": 2.0}
    assert two.parts == {"stages": 2.0, "communication": 4.0, "compute": 5.0}
    assert one.seconds == two.seconds == 11.0
    with pytest.raises(ValueError, match="that none of them sends"):
        replay_stages([(first, pipe), ([], pipe)], PLAIN, "pipe")


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv"])
def test_a_pipeline_takes_what_its_slowest_stage_makes_it_take(name: str) -> None:
    """Equal stages as their schedule says; a stage with more layers costs more than its bubble."""

    def seen(partition: Any) -> list[Any]:
        plain = zf.train_step(loss, CLIPPED)
        step = zf.pipeline(plain, 4, schedule=name, pipe=2, partition=partition)
        step = zf.shard(step, stage=0)
        state, rows = STEPS["plain"].state(), torch.cat([batch(1)] * 2)
        return [zf.foresee(step, state, rows, ranks=2, rank=rank) for rank in range(2)]

    cluster = Cluster.preset("h100", gpus=2, dispatch=0.0, gap=1e-4)
    first, last = seen("flops")
    together = first.time(cluster, others=[last])
    assert together.seconds == last.time(cluster, others=[first]).seconds
    assert "stages wait" in str(first.time(cluster)) and "stages wait" not in str(together)
    assert together.seconds > max(sum(first.time(cluster).busy.values()) * 0.5, 0.0)
    if name == "gpipe":
        few, many = seen((0, 1, 4))
        uneven = few.time(cluster, others=[many])
        assert uneven.seconds > 1.2 * together.seconds
        assert uneven.parts["stages"] > 2 * many.time(cluster, others=[few]).parts["stages"]


@cache
def foreseen(ranks: int = 4, n: int = 1) -> Any:
    step = zf.accumulate(STEPS["plain"].step(3, ranks), n)
    return zf.foresee(step, STEPS["plain"].state(), torch.cat([batch(1)] * n), ranks=ranks)


def test_slower_links_take_longer_and_microbatches_as_long_as_each_other() -> None:
    fast = Cluster.preset("a100-80", gpus=4)
    slow = replace(fast, nvlink=1e6)
    one, two, three, four = (float(foreseen(n=n).time(slow)) for n in (1, 2, 3, 4))
    assert four - three == pytest.approx(three - two) and two > one > foreseen().time(fast).seconds
    assert foreseen().time(slow).binds == "communication"


def test_the_lanes_are_a_trace(tmp_path: Path) -> None:
    took = foreseen().time(Cluster.preset("h100", gpus=4))
    events = json.loads(took.chrome(tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(took.lanes)
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(1e6 * took.seconds, rel=0.01)
    assert "optimistic" in str(took)


def test_a_cluster_is_a_file_and_back(tmp_path: Path) -> None:
    mine = Cluster.preset("mi250x", gpus=64, nic=1e9, peak_flops={"float8_e4m3fn": 1e15})
    assert Cluster.load(mine.save(tmp_path / "mine.json")) == mine
    assert Cluster.load(tmp_path / "mine.json", gpus=8).gpus == 8
    assert mine.peak("float16") == 191.5e12 and mine.peak("float8_e4m3fn") == 1e15


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100", "h200", "mi100", "mi250x"])
def test_presets_are_clusters(name: str) -> None:
    mine = Cluster.preset(name, gpus=16)
    assert mine.nodes == 16 // mine.gpus_per_node and 0 < mine.nic < mine.nvlink
    assert mine.peak("bfloat16") > 2 * mine.peak("float32") > 2 * mine.memory_bandwidth
    assert "link_share" in mine.guessed


def test_unknown_names_are_told_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="no 'a100'; there are a100-40, a100-80, h100"):
        Cluster.preset("a100", gpus=8)
    with pytest.raises(ValueError, match="no field nvlnk; there are device, gpus, memory"):
        Cluster.preset("h100", gpus=8, nvlnk=1.0)
    with pytest.raises(ValueError, match="product=2, expected a share"):
        Cluster.preset("h100", gpus=8, product=2)
    with pytest.raises(ValueError, match="nic='fast', expected a number"):
        Cluster.preset("h100", gpus=8, nic="fast")
    with pytest.raises(TypeError, match="'h100' is no cluster"):
        foreseen().time("h100")


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"latency": float("nan")}, "latency=nan, expected a number"),
        ({"latency": -1.0}, "latency=-1.0, expected 0 or more"),
        ({"product_ramp": -256.0}, "product_ramp=-256.0, expected 0 or more"),
        ({"gpus_per_node": 0.5}, "gpus_per_node=0.5, expected a whole number"),
        (
            {"peak_flops": {"float32": 1, "bfloat16": 0}},
            "peak_flops.'bfloat16'.=0, expected a number above 0",
        ),
        ({"peak_flops": {"float32": -1}}, "peak_flops.'float32'.=-1, expected a number above 0"),
        ({"peak_flops": None}, "peak_flops=None, expected FLOP/s by the name of a dtype"),
        ({"calibrated": True}, "calibrated=True, expected text"),
    ],
)
def test_numbers_that_no_cluster_has(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"Cluster: {what}"):
        replace(PLAIN, **how)


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "this is no JSON"), ('{"device": "x"}', "it lacks gpus, memory"), ("[]", "JSON object")],
)
def test_a_file_that_is_no_cluster(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"cluster.json: .*{what}"):
        Cluster.load(path)


def test_a_link_that_is_not_there_is_named() -> None:
    alone = Cluster.preset("h100", gpus=16, nic=0)
    told = foreseen(4)
    assert told.time(alone).seconds > 0
    with pytest.raises(DeviceError, match=r"along 'data' are on 2 nodes of 2.*give nic="):
        told.time(replace(alone, gpus_per_node=2))
    with pytest.raises(DeviceError, match="has no link within one: give nvlink= or pcie="):
        told.time(replace(alone, nvlink=0, pcie=0))


def test_a_cluster_that_is_too_small_or_of_another_kind_is_refused() -> None:
    with pytest.raises(DeviceError, match="4 ranks, and the cluster has 2 devices: give gpus=4"):
        foreseen(4).time(Cluster.preset("h100", gpus=2))
    with pytest.raises(DeviceError, match=r"foreseen with device='cuda'.*device='cpu'"):
        foreseen(4).time(replace(Cluster.preset("h100", gpus=4), kind="cpu"))


def test_a_calibration_is_of_the_same_device(tmp_path: Path) -> None:
    mine = Cluster.preset("h100", gpus=64)
    found = replace(mine, gpus=1, stream=0.5, calibrated="on 2026-11-25")
    path = found.save(tmp_path / "calibration.json")
    better = mine.measured_by(path)
    assert (better.stream, better.gpus, better.guessed) == (0.5, 64, ())
    with pytest.raises(DeviceError, match=r"a calibration of 'NVIDIA H100.*zfunc calibrate"):
        Cluster.preset("a100-80", gpus=64).measured_by(path)
    with pytest.raises(DeviceError, match="no calibration, but published"):
        mine.measured_by(mine)


def test_measured_links_say_nothing_of_others() -> None:
    """What a node's links reach is no share of what the network's do."""
    mine = Cluster.preset("h100", gpus=64)
    found = replace(mine, gpus=8, nvlink=3e11, latency=1e-5, hop=0.0, calibrated="on 2026-11-25")
    better = mine.measured_by(found)
    assert better.nvlink * better.link_share == pytest.approx(3e11 * found.link_share)
    assert (better.nic, better.link_share, better.hop) == (mine.nic, mine.link_share, 0.0)
    assert "links between nodes as published" in str(foreseen().time(better))
    older = replace(found, link_share=1.0)
    assert mine.measured_by(older).nvlink * mine.link_share == pytest.approx(3e11)
