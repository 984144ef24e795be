"""Machine code of compressed steps is made while plain ones run: none of them waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zfunc.kernels.llvm import host

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not host().isa, reason=f"no machine code here: {host().why}")

# A process of its own: machine code is made once.
PLACED = """
import threading, torch
import zfunc as zf
from zfunc import optim
from zfunc.kernels import llvm

def loss(params, batch):
    return torch.tanh(batch @ params["w"] + params["b"]).square().mean()

params = {"w": torch.ones(70, 300), "b": torch.zeros(300)}
tx = optim.adamw(1e-2)

def rank():
    step = zf.donate(zf.shard(zf.train_step(loss, tx), stage=STAGE))
    step = zf.compress_grads(step, "onebit", freeze_step=1)
    state = step.place(zf.TrainState.create(params, tx))
    for thread in threading.enumerate():
        if thread.name == "zfunc compiles ahead":
            thread.join()
    made = len(llvm._KEPT)
    for _ in range(3):
        state, metrics = step(state, torch.randn(4, 70))
    return made, len(llvm._KEPT)

before, after = zf.simulate(2)(rank)()[0]
print(before, after)
"""


@pytest.mark.parametrize("stage", [0, 2])
def test_compressed_steps_make_no_machine_code(stage: int) -> None:
    code = PLACED.replace("STAGE", str(stage))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made, after = map(int, done.stdout.split())
    assert made and after == made


def test_a_process_ends_well_while_a_simulated_rank_has_code_made() -> None:
    """A daemon, which the threads of simulated ranks are, would be torn out of LLVM: an abort."""
    code = PLACED.replace("STAGE", "0")
    ends = code.index("    for thread in")
    code = (
        code[:ends]
        + """
    return [thread.daemon for thread in threading.enumerate() if "compiles" in thread.name]

print(sum(zf.simulate(2)(rank)(), []))
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "False" in done.stdout and "True" not in done.stdout
