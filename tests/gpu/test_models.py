"""Models and meshes beyond the matrix: Hugging Face's, MoQ through its phases, two axes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zfunc as zf
from tests.dist.trainer_runs import Tokens
from tests.dist.trainer_runs import model_of as trainer_model
from tests.gpu import ranks
from tests.gpu.cuda import Cuda
from tests.gpu.training import Model, Trained, gpt_model, trained
from tests.laws.cases import assert_near
from tests.laws.test_huggingface import LENGTH, MODELS, VOCAB, module_of
from zfunc import kernels, optim

TX = optim.adamw(1e-3)


def both(wrap: Any, model: Callable[[str], Model], **how: Any) -> tuple[Trained, Trained]:
    """A run on the device, and the same on the host, where twins compute as well."""
    with kernels.use("torch"):
        host = trained(wrap, TX, model("cpu"), on_gpu=False, **how)
    with Cuda():
        return trained(wrap, TX, model("cuda"), **how), host


def assert_alike(mine: Trained, host: Trained, tolerance: float) -> None:
    assert not [str(row) for report in mine.reports for row in report.faults()]
    assert_near(mine.metrics, host.metrics, tolerance, "metrics")
    assert_near(mine.state.params, host.state.params, tolerance, "params")


def hugging_face(name: str, dtype: torch.dtype, device: str) -> Model:
    """Moved as users move it: the whole module, with its buffers."""

    def batch(i: int) -> dict[str, Any]:
        ids = zf.random.randint(zf.random.key(i), 0, VOCAB, (4, LENGTH))
        return {"input_ids": ids, "labels": ids.clone()}

    torch.manual_seed(0)
    functional = zf.functionalize(module_of(name).to(dtype).to(device))
    return Model(
        lambda: functional.params,
        lambda params, batch: functional.apply(params, **batch).loss,
        batch,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models_train(name: str, dtype: torch.dtype) -> None:
    def wrap(step: Any) -> Any:
        return zf.remat(zf.shard(step, stage=3, unit_bytes=1 << 12))

    mine, host = both(wrap, lambda device: hugging_face(name, dtype, device), steps=2)
    assert_alike(mine, host, 1e-9 if dtype == torch.float64 else 1e-5)
    assert mine.reports[-1].count("kernel") > 0 or dtype == torch.float64


@pytest.mark.parametrize("curvature", [None, "power_iteration"])
def test_moq_through_all_its_phases(curvature: str | None) -> None:
    """16 bits, falling ones, mixed and stochastic, and the last."""

    def wrap(step: Any) -> Any:
        how = {"start_bits": 16, "target_bits": 12, "offset": 1, "period": 1, "mix_rate": 0.5}
        return zf.quantize(
            zf.shard(step, stage=3, unit_bytes=1 << 10),
            rounding="stochastic",
            **({"curvature": curvature} if curvature else {}),
            **how,
        )

    # Attention twice differentiated makes its mask below torch's dispatch, on the true device.
    model = (
        (lambda device: PERCEPTRON) if curvature else lambda device: gpt_model(2, 8, torch.float64)
    )
    mine, host = both(wrap, model, steps=8, key=3)
    assert_alike(mine, host, 1e-6)  # its scales are float32


def _perceptron(params: Any, x: torch.Tensor) -> torch.Tensor:
    y = x
    for layer in params["layers"]:
        y = torch.tanh(y @ layer["w"])
    return (y - x).square().mean()


def _draw(n: int, *shape: int) -> torch.Tensor:
    return zf.random.normal(zf.random.key(n), shape, torch.float64)


PERCEPTRON = Model(
    lambda: {"layers": zf.Layers([{"w": _draw(i, 8, 8) / 3} for i in range(3)])},
    _perceptron,
    lambda i: _draw(100 + i, 4, 8),
)


def _on_two_axes(stage: int) -> float:
    def wrap(step: Any) -> Any:
        mesh = zf.mesh(data=2, tensor=2)
        return zf.shard(step, stage=stage, mesh=mesh, axis="data", unit_bytes=1 << 10)

    model = gpt_model(2, 8, torch.float64)
    mine = trained(wrap, TX, model)
    host = trained(wrap, TX, model, on_gpu=False)
    assert_alike(mine, host, 1e-9)
    communicators = {row.group for row in mine.reports[-1].collectives()}
    others = {name for name in communicators if not name.endswith(" of 2")}
    assert communicators and len(others) <= 1  # all ranks are asked whether they have the same rows
    return float(mine.metrics[-1]["loss"])


def _on_replicas(stage: int) -> float:
    def wrap(step: Any) -> Any:
        mesh = zf.mesh(replica=2, data=2)
        return zf.shard(step, stage=stage, mesh=mesh, unit_bytes=1 << 10)

    model = gpt_model(2, 8, torch.float64)
    mine = trained(wrap, TX, model)
    host = trained(wrap, TX, model, on_gpu=False)
    assert_alike(mine, host, 1e-9)
    communicators = {row.group for row in mine.reports[-1].collectives()}
    assert any(name.endswith(" of 2") for name in communicators)
    return float(mine.metrics[-1]["loss"])


def _on_both_meshes() -> tuple[float, list[float]]:
    losses = []
    for stage in range(4):
        try:
            losses.append(_on_replicas(stage))
        except BaseException as error:
            error.add_note(f"at stage {stage} on replicas")
            raise
    return _on_two_axes(3), losses


def test_meshes_of_two_axes() -> None:
    """No race between the streams of two communicators, and no rank in another order."""
    split, replicas = zip(*ranks.launch(_on_both_meshes, nprocs=4), strict=True)
    assert len(set(split)) <= 2
    assert all(losses == replicas[0] for losses in replicas)


def _chosen() -> tuple[str, str, str]:
    import torch.distributed as dist

    from zfunc.ranks import world

    return str(world.current().device), str(dist.get_backend_config()), dist.get_backend()


def test_ranks_choose_their_devices_themselves() -> None:
    found = ranks.launch(_chosen)
    assert [device for device, _, _ in found] == ["cuda:0", "cuda:1"]
    assert {config for _, config, _ in found} == {"cpu:gloo,cuda:nccl"}


def test_a_lone_trainer_computes_on_the_gpu(tmp_path: Path) -> None:
    """As transformers' does, which moves the model there; it stays there when it has trained."""
    losses = {}
    for on_gpu in (True, False):
        module = trainer_model("llama")
        with Cuda() if on_gpu else contextlib.nullcontext():
            quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 3}
            arguments = transformers.TrainingArguments(
                str(tmp_path), max_steps=3, logging_steps=1, use_cpu=not on_gpu, **quiet
            )
            trainer = zf.hf.Trainer(module, arguments, train_dataset=Tokens("llama", 64, 0))
            trainer.pop_callback(transformers.PrinterCallback)
            trainer.train()
            assert {p.device.type for p in module.parameters()} == {"cuda" if on_gpu else "cpu"}
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        losses[on_gpu] = logged
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
