"""Models of Hugging Face on a real GPU: they train and write as they do on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.gpu.test_matrix import alike, beside
from tests.gpu.test_replayed_texts import padded
from tests.laws.test_huggingface import LENGTH, MODELS, VOCAB, module_of
from tests.unit.test_generation import causal
from zfunc import optim, quant
from zfunc.language import decoding_graph

TX = optim.adamw(1e-3, weight_decay=0.1)
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
WRAPS: dict[str, Any] = {
    "stage 3, remat": lambda f: zf.remat(zf.shard(f, stage=3, unit_bytes=1 << 12)),
    "donate, offload": lambda f: zf.donate(zf.offload(zf.shard(f, stage=1, unit_bytes=1 << 12))),
}


def trained(name: str, wrap: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Losses and parameters of two steps, the module moved whole, as users move it."""
    torch.manual_seed(0)
    model = zf.functionalize(module_of(name).to(dtype).to(device))
    step = wrap(zf.train_step(lambda p, batch: model.apply(p, **batch).loss, TX))
    state, losses = step.place(zf.TrainState.create(model.params, TX)), []
    for i in range(2):
        ids = zf.random.randint(zf.random.key(i), 0, VOCAB, (4, LENGTH)).to(device)
        state, metrics = step(state, {"input_ids": ids, "labels": ids.clone()})
        losses.append(metrics["loss"])
    found = {"params": step.unplace(state).params, "losses": losses}
    return zf.tree.map(lambda x: x.detach().cpu(), found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models_train(name: str, wrap: str, dtype: torch.dtype) -> None:
    mine, host = (trained(name, WRAPS[wrap], device, dtype) for device in (GPU, HOST))
    torch.manual_seed(0)
    start = zf.tree.flatten_names(zf.functionalize(module_of(name).to(dtype)).params)
    apart = beside([*alike(mine, host)], start)
    # Its own norms and loss are float32; Adam's first steps are of one size, whatever moved them.
    most = {torch.float64: 1e-4, torch.float32: 0.02, torch.bfloat16: 0.5}[dtype]
    assert max(apart.values()) < most, apart
    assert torch.allclose(
        torch.stack(mine["losses"]).float(),
        torch.stack(host["losses"]).float(),
        rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
    )


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_graphs_continue_texts_as_the_host_does(
    name: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded over several extents of the cache, and without graphs: the host's own tokens."""
    monkeypatch.setattr(decoding_graph, "SMALLEST", 8)
    texts = []
    for device, capture in ((HOST, False), (GPU, True), (GPU, False)):
        model = zf.functionalize(causal(name).to(device))
        params = model.params
        if bits is not None:
            params = quant.quantize_tree(params, bits=bits, group_size=16)
        ids, mask = (x.to(device) for x in padded(4))
        run = partial(zf.generate, model, params, ids, attention_mask=mask)
        texts.append(run(max_new_tokens=30, capture=capture).cpu())
    assert torch.equal(texts[1], texts[2])
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_bfloat16_graphs_write_what_eager_steps_write(bits: int | None) -> None:
    """In the dtype whose kernels a GPU has, drawn from seeds."""
    model = zf.functionalize(causal("llama").to(GPU, torch.bfloat16))
    params = (
        model.params
        if bits is None
        else quant.quantize_tree(model.params, bits=bits, group_size=16)
    )
    ids, mask = (x.to(GPU) for x in padded(4))
    how = {"attention_mask": mask, "max_new_tokens": 40, "temperature": 0.8}
    one, two = (
        zf.generate(model, params, ids, key=zf.random.key(4), capture=capture, **how)
        for capture in (True, False)
    )
    assert torch.equal(one, two)
