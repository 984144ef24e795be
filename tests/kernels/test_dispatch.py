"""Which code runs, and why; what ``zfunc doctor`` says of it; without Triton as well."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zfunc import kernels
from zfunc.commands import cli
from zfunc.kernels import devices, dispatch, verification
from zfunc.kernels.llvm import Host, host

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_on_a_cpu_machine_code_runs_where_there_is_some_and_else_the_twins():
    for name, kernel in dispatch.KERNELS.items():
        choice = kernels.choose(name, torch.ones(3, dtype=torch.bfloat16))
        if kernel.machine and host().isa:
            assert choice == kernels.Choice(
                "llvm", f"tensors are on cpu: {host().isa}, through LLVM"
            )
        else:
            assert choice.route == "torch" and choice.why.startswith("tensors are on cpu")
    with kernels.use("torch"):
        assert str(kernels.choose("lion_flat", torch.ones(3))) == "torch: asked for by kernels.use"


def test_triton_is_not_pretended():
    with kernels.use("triton"), pytest.raises(kernels.KernelError, match="tensors are on cpu"):
        kernels.choose("lion_flat", torch.ones(3))
    with kernels.use("triton"), kernels.use(None):
        assert kernels.choose("rms_norm", torch.ones(3)).route == "torch"


def test_machine_code_is_not_pretended(monkeypatch: pytest.MonkeyPatch):
    with kernels.use("llvm"), pytest.raises(kernels.KernelError, match=r"but for .*onebit_pack"):
        kernels.choose("rms_norm", torch.ones(3))
    wide = torch.ones(3, dtype=torch.float64)
    assert "in float32, not torch.float64" in kernels.choose("onebit_pack", wide.float(), wide).why
    with kernels.use("llvm"), pytest.raises(kernels.KernelError, match=r"not torch\.float64"):
        kernels.choose("onebit_pack", wide.float(), wide)
    monkeypatch.setattr(dispatch, "host", lambda: Host("", False, "llvmlite is not installed"))
    choice = kernels.choose("onebit_pack", torch.ones(3))
    assert choice.route == "torch" and "llvmlite is not installed" in choice.why


def test_what_means_nothing_is_named():
    with (
        pytest.raises(kernels.KernelError, match="'Triton' is no route; expected \"triton\""),
        kernels.use("Triton"),  # type: ignore[arg-type]
    ):
        pass
    with pytest.raises(kernels.KernelError, match="no kernel 'rmsnorm'; expected one of glu"):
        kernels.choose("rmsnorm", torch.ones(3))
    with pytest.raises(kernels.KernelError, match="rms_norm of no tensors"):
        kernels.choose("rms_norm", None)


Q = torch.randn(1, 1, 4, 4)
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm_backward": kernels.rms_norm,
    "glu_backward": lambda x: kernels.swiglu(x, x),
    "bias_gelu_backward": kernels.bias_gelu,
    "cross_entropy_backward": lambda x: kernels.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
    "rotary": lambda x: kernels.rotary(x[None, None], Q, x[:, :2].detach(), x[:, :2].detach())[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_takes_the_route_of_its_forward_in_any_thread(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU autograd has threads of its own, which do not see what this one insists on."""
    seen: dict[str, object] = {}
    run = dispatch.run

    def watched(kernel: str, *args: Any, **how: Any) -> None:
        seen[kernel] = dispatch.forced()
        run(kernel, *args, **how)

    monkeypatch.setattr(dispatch, "run", watched)
    x = torch.randn(4, 4, requires_grad=True)
    with kernels.use("torch"):
        y = CALLS[name](x).sum()
    seen.clear()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert seen == {name: "torch"} and dispatch.forced() is None
    assert x.grad is not None


def test_what_triton_cannot_take_is_said():
    x = torch.ones(3, dtype=torch.float64, device="meta")
    assert "does not take torch.float64" in kernels.choose("lion_flat", x).why
    assert "up to 16384, not 20000" in kernels.choose("fake_quant", x.float(), size=20000).why


def test_every_kernel_has_a_configuration_a_launcher_and_a_sample():
    for name, kernel in dispatch.KERNELS.items():
        assert dispatch.config(name)["BLOCK"] > 0
        for place in filter(None, (kernel.launch, kernel.machine)):
            module, _, function = place.partition(":")
            path = ROOT / "kernels" / f"{module.rpartition('.')[2]}.py"
            assert re.search(rf"^(def {function}\(|{function} = )", path.read_text(), re.MULTILINE)
    assert set(verification.SAMPLES) == set(dispatch.KERNELS)
    assert set(dispatch.tables("")) == set(dispatch.tables("AMD")) == set(dispatch.KERNELS)


def test_a_gpu_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "default.json").write_text('{"a": {"BLOCK": 1}, "b": {"BLOCK": 2}}')
    (folder / "some-gpu-80gb.json").write_text('{"b": {"BLOCK": 3}}')
    monkeypatch.setattr(dispatch, "__file__", str(tmp_path / "dispatch.py"))
    dispatch.tables.cache_clear()
    try:
        assert dispatch.tables("Some GPU (80GB)") == {"a": {"BLOCK": 1}, "b": {"BLOCK": 3}}
        assert dispatch.tables("Another")["b"] == {"BLOCK": 2}
        (folder / "amd.json").write_text('{"a": {"BLOCK": 4}}')
        assert dispatch.tables("AMD Instinct MI300X") == {"a": {"BLOCK": 4}, "b": {"BLOCK": 2}}
        assert dispatch.config("a", target="gfx90a") == {"BLOCK": 4}
        (folder / "sm_80.json").write_text('{"b": {"BLOCK": 5}}')
        assert dispatch.config("b", target="sm_80") == {"BLOCK": 5}
        assert dispatch.tables("Some GPU (80GB)", "sm_80")["b"] == {"BLOCK": 3}
    finally:
        dispatch.tables.cache_clear()


def test_a_launch_asks_the_driver_once_and_grids_follow_its_processors(
    monkeypatch: pytest.MonkeyPatch,
):
    skinny = pytest.importorskip("zfunc.kernels.skinny_launch")
    asked: list[int] = []

    def properties(index: int) -> Any:
        asked.append(index)
        return types.SimpleNamespace(multi_processor_count=(108, 148)[index], major=8, minor=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Some GPU {index}")
    devices._asked.cache_clear()
    try:
        for index, programs in ((0, 216), (1, 296)):
            place = torch.device("cuda", index)
            for _ in range(3):
                assert dispatch.config("adamw_flat", place)["BLOCK"] == 1024
                how = skinny.tile("w4_mm", 128, 4, 4096, norm=False, device=place)
                assert how["PROGRAMS"] == programs
        assert asked == [0, 1]
    finally:
        devices._asked.cache_clear()


def test_importing_everything_imports_neither_triton_nor_dynamo():
    """Either would double the time until a rank or a command is up."""
    code = """
        import sys, zfunc, zfunc.commands.cli, zfunc.kernels
        everything = [getattr(zfunc, name) for name in zfunc.__all__]
        print({"zfunc.kernels.adamw_triton", "torch._dynamo"} & sys.modules.keys())
    """
    assert python(code) == "set()\n"


def test_without_triton_everything_runs():
    said = python(
        """
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "triton":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent())
        import importlib.util
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda n, p=None: None if n == "triton" else real(n, p)
        import torch
        from zfunc import kernels
        print(kernels.choose("rms_norm", torch.ones(3)))
        print(kernels.fake_quant(torch.tensor([1.0, -2.0]), bits=2))
        print(kernels.onebit_pack(torch.ones(9), torch.zeros(9))[0])
        """
    )
    assert said.splitlines()[0] == "torch: Triton is not installed"
    assert "tensor([ 0., -2.])" in said and "tensor([255,   1], dtype=torch.uint8)" in said


def test_doctor(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--verify"]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in said
    for name in dispatch.KERNELS:
        assert f"\n  {name} " in said and f"verify {name}: right" in said
    if not torch.cuda.is_available():
        count = len(dispatch.KERNELS)
        assert f"in Triton's interpreter, without a GPU: {count} of {count} kernels" in said
        assert "nothing was compiled for a GPU or run on one" in said


def test_an_unknown_kernel_is_named():
    with pytest.raises(kernels.KernelError, match=r"no kernel 'soap'; .* some of .*adamw_flat"):
        kernels.verify(["soap"])
