"""Without llvmlite: what acts on a state or travels has the same bits, and one warning is given.

Two processes run the same program, one of them with a finder that lets no import of llvmlite pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zfunc.kernels.llvm import host

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not host().isa, reason=f"no machine code here: {host().why}")

HIDE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llvmlite":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

START = """
import hashlib, itertools, json, sys
import torch
import zfunc as zf
from zfunc import kernels, optim, quant, tree

def digest(found):
    tensors = [x for x in tree.leaves(found) if isinstance(x, torch.Tensor)]
    whole = hashlib.sha256()
    for x in tensors:
        whole.update(str((x.dtype, x.shape)).encode())
        whole.update(bytes(x.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return whole.hexdigest()[:16]

out = {}
torch.manual_seed(1)
"""

KERNELS = """
routes = set()
for n in (1, 100, 8192 + 17, 70001):
    x, error = 3 * torch.randn(n), 0.1 * torch.randn(n)
    routes.add(kernels.choose("onebit_pack", x).route)
    for group, scaling in itertools.product((None, 128, 2048), ("rms", "mean")):
        how = {"group": group, "scaling": scaling}
        bits, scale, left = kernels.onebit_pack(x, error, **how)
        mean = kernels.onebit_mean(bits.repeat(3, 1), scale.repeat(3, 1), error, **how)
        values = kernels.onebit_unpack(bits, scale, n, group=group)
        out["onebit", n, group, scaling] = [bits, scale, left, *mean, values]
    for bits, symmetric, seed in itertools.product((8, 4), (True, False), (None, 7)):
        how = {"bits": bits, "symmetric": symmetric, "seed": seed}
        q, scale, zero = kernels.quantize_groups(x, **how)
        back = kernels.dequantize_groups(q, scale, zero, n, bits=bits)
        fake = kernels.fake_quant(x, **how)
        out["levels", n, bits, symmetric, seed] = [q, scale, zero, back, fake]
        form = kernels.Payload(n, bits=bits, symmetric=symmetric)
        sent, left = kernels.quantize_payload(x, form, error, seed=seed)
        mean = kernels.mean_payloads(sent.repeat(3, 1), form, error, seed=seed)
        out["payload", n, bits, symmetric, seed] = [sent, left, *mean]
    for dtype in (torch.float32, torch.bfloat16):
        param, mean, squares = 3 * torch.randn(n), torch.randn(n), error.square()
        kernels.momentum_shares_(x.to(dtype), mean, squares, kernels.shares_hyper(0.9, 0.5))
        out["shares", n, dtype] = mean.clone()
        hyper = kernels.frozen_hyper(0.01, 1.1, 0.5, most=0.1, kept=0.99)
        for shares in (True, False):
            kernels.adamw_frozen_(param, mean, squares, hyper, shares=shares)
            out["frozen", n, dtype, shares] = [x.clone() for x in (param, mean, squares)]
out["routes"] = sorted(routes)
"""

STEPS = """
def loss(params, batch):
    x = torch.tanh(batch @ params["first"])
    x = zf.scan(lambda p, x: torch.tanh(x @ p["w"]) + x, params["blocks"], x)
    return x.square().mean()

def start(tx):
    draw = lambda *shape: 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    blocks = zf.Layers([{"w": draw(70, 70) + i} for i in range(2)])
    return zf.TrainState.create({"first": draw(33, 70), "blocks": blocks}, tx, key=0)

def trained(wrap, tx):
    def rank():
        step = wrap(zf.train_step(loss, tx))
        state = step.place(start(tx))
        batches = torch.randn(5, 4, 33, generator=torch.Generator().manual_seed(zf.rank()))
        with zf.comm.ledger() as ledger:
            for batch in batches:
                state, metrics = step(state, batch)
        whole = step.unplace(state)
        return [digest((whole.params, whole.opt_state)), digest(metrics), ledger.total_bytes]
    return zf.simulate(2)(rank)()

def compressed(stage, method, **how):
    return lambda f: zf.compress_grads(zf.shard(f, stage=stage), method, **how)

adamw = optim.adamw(1e-2)
for stage in (0, 1, 3):
    out["onebit", stage] = trained(compressed(stage, "onebit", freeze_step=2), adamw)
out["zero_one"] = trained(compressed(0, "zero_one", freeze_step=2), adamw)
out["lamb"] = trained(compressed(0, "onebit", freeze_step=2), optim.lamb(1e-2))
out["momentum"] = trained(compressed(0, "onebit", group=None), optim.sgd(1e-2, momentum=0.9))
for method in ("int8", "int4"):
    out[method] = trained(compressed(2, method), adamw)
    out[method, "gather"] = trained(compressed(2, "int8", gather=method), adamw)
out["gathered bits"] = trained(compressed(1, "int8", gather="onebit"), adamw)
out["moq"] = trained(
    lambda f: zf.quantize(f, start_bits=8, target_bits=4, offset=1, period=1), adamw
)
for name, tx in {"adamw": adamw, "lion": optim.lion(1e-2), "lamb": optim.lamb(1e-2)}.items():
    out["precision", name] = trained(lambda f: zf.precision(zf.shard(f, stage=1)), tx)
"""

END = """
kept = {str(k): x if isinstance(x, (list, str)) and not any(
    isinstance(y, torch.Tensor) for y in x) else digest(x) for k, x in out.items()}
print(json.dumps([kept, "llvmlite" in sys.modules]))
"""


PRODUCT = """
print("so far nothing", file=sys.stderr)
weight = quant.QTensor.quantize(torch.randn(64, 256), quant.Format(bits=4, group_size=128))
for _ in range(2):
    torch.nn.functional.linear(torch.randn(2, 256), weight)
"""


def ran(*parts: str) -> tuple[dict[str, Any], bool, str]:
    """What a fresh process found, whether it has llvmlite, and what it logged."""
    command = [sys.executable, "-c", "".join(parts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, there = json.loads(done.stdout.splitlines()[-1])
    return found, there, done.stderr


def test_what_acts_on_a_state_or_travels_has_the_same_bits() -> None:
    found, there, said = ran(START, KERNELS, STEPS, END)
    other, hidden, warned = ran(HIDE, START, KERNELS, STEPS, END)
    assert there and not hidden
    assert found.pop("routes") == ["llvm"] and other.pop("routes") == ["torch"]
    assert {name: other[name] for name in found if other[name] != found[name]} == {}
    assert "llvmlite" not in said
    assert warned.count("llvmlite is not installed") == 1, warned
    assert "pip install 'zfunc-torch[cpu]'" in warned and "one-bit compression" in warned


def test_a_product_warns_and_what_needs_none_does_not_look_for_it() -> None:
    functions, _, _ = STEPS.partition("adamw = ")
    plain = "out['plain'] = trained(lambda f: f, optim.adamw(1e-2))\n"
    plain += "assert not kernels.llvm.host.cache_info().currsize\n"
    _, _, said = ran(HIDE, START, functions, plain, PRODUCT, END)
    before, _, after = said.partition("so far nothing")
    assert "llvmlite" not in before and after.count("llvmlite is not installed") == 1, said


def test_doctor_says_what_is_slower() -> None:
    code = HIDE + "from zfunc.commands import cli; sys.exit(cli.main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("slower on this CPU")]
    assert "llvmlite is not installed (pip install 'zfunc-torch[cpu]')" in line
    for name in ("low-bit products", "onebit_mean", "quantize_groups"):
        assert name in line
    assert "rms_norm" not in line and "adamw_flat" not in line
