"""Hugging Face's files in and out, without ever holding the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zfunc as zf
from tests.laws.cases import ADAMW, assert_same, bits, numbers
from tests.unit.peaks import measured, needs_peaks
from zfunc import tree
from zfunc.files import chunks

transformers = pytest.importorskip("transformers")


def llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, **more
    )
    return transformers.GPT2LMHeadModel(config)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


def zeroed(params: Any) -> Any:
    return tree.map(torch.zeros_like, params)


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("shard_size", ["20KB", "1GB"])
def test_save_pretrained_in_and_out(
    make: Any, shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into state at any stage on any number of ranks, and back to the tensors that there were."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 10)
    torch.manual_seed(1)
    module = make(tie_word_embeddings=make is gpt2)
    module.save_pretrained(tmp_path / "in", max_shard_size=shard_size)
    assert ((tmp_path / "in" / "model.safetensors").exists()) == (shard_size == "1GB")
    functional = zf.functionalize(module)
    ids = torch.arange(12).view(1, 12)
    expected = module.eval()(ids).logits.detach()

    def loss(params: Any, batch: Any) -> Any:
        return functional.apply(params, batch).logits.square().mean()

    def body(stage: int) -> None:
        step = zf.shard(zf.train_step(loss, ADAMW), stage=stage, unit_bytes=20_000)
        state = step.place(zf.TrainState.create(zeroed(functional.params), ADAMW))
        params = zf.import_safetensors(tmp_path / "in", like=state.params)
        out = tmp_path / f"{stage}-{zf.world_size()}"
        zf.export_safetensors(out, params, shard_bytes=20_000)
        state, _ = step(state.replace(params=params), ids)  # its marks are there

    for ranks, stage in ((1, 0), (2, 3), (3, 3), (4, 1)):
        zf.simulate(ranks)(body)(stage)
        out = tmp_path / f"{stage}-{ranks}"
        assert_same(files_of(out), files_of(tmp_path / "in"))
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert {(out / name).exists() for name in index["weight_map"].values()} == {True}
        for name in ("config.json", "generation_config.json"):
            shutil.copy(tmp_path / "in" / name, out)
        again = type(module).from_pretrained(out).eval()
        assert torch.equal(again(ids).logits, expected)


def test_tied_weights_may_be_named_twice_or_once_by_another_name(tmp_path: Path) -> None:
    functional = zf.functionalize(gpt2())
    weights = tree.flatten_names(functional.params)
    table = weights["transformer.wte.weight"]
    assert "lm_head.weight" not in weights
    both = {**{k: v.contiguous() for k, v in weights.items()}, "lm_head.weight": table.clone()}
    save_file(both, tmp_path / "both.safetensors")
    got = zf.import_safetensors(tmp_path / "both.safetensors", zeroed(functional.params))
    assert_same(got, functional.params)
    save_file({**both, "lm_head.weight": table + 1}, tmp_path / "untied.safetensors")
    with pytest.raises(zf.CheckpointError, match=r"Unexpected: lm_head\.weight\."):
        zf.import_safetensors(tmp_path / "untied.safetensors", functional.params)
    once = {k: v for k, v in both.items() if k != "transformer.wte.weight"}
    save_file(once, tmp_path / "once.safetensors")
    with pytest.raises(zf.CheckpointError, match=r"Missing: transformer\.wte\.weight.*`names`"):
        zf.import_safetensors(tmp_path / "once.safetensors", functional.params)
    names = {"transformer.wte.weight": "lm_head.weight"}
    got = zf.import_safetensors(tmp_path / "once.safetensors", zeroed(functional.params), names)
    assert_same(got, functional.params)


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1, dtype=torch.int64)},
        tmp_path / "x.safetensors",
    )
    like = {"a": torch.ones(3), "c": torch.ones(1), "d": torch.ones(1)}

    def body() -> None:
        zf.import_safetensors(tmp_path, like)

    with pytest.raises(zf.CheckpointError) as caught:
        zf.simulate(2)(body)()
    said = str(caught.value)
    for part in ("Missing: d.", "Unexpected: b.", "a (F32 [2] there, F32 [3] here)",
                 "c (I64 [1] there, F32 [1] here)"):  # fmt: skip
        assert part in said
    got = zf.import_safetensors(tmp_path, {"b": torch.zeros(3)}, strict=False)
    assert got["b"].tolist() == [1.0] * 3


def test_floats_are_converted_and_nothing_else(tmp_path: Path) -> None:
    x = numbers((50, 3), 1)
    save_file({"w": x}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = zf.import_safetensors(tmp_path, {"w": torch.zeros(50, 3, dtype=dtype)})["w"]
        assert bits(got) == bits(x.to(dtype))


@pytest.mark.parametrize("dtype", chunks.NAMES, ids=str)
def test_every_dtype_as_safetensors_writes_it(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (12 * dtype.itemsize,), dtype=torch.uint8)
    tree_ = {
        "x": (raw % 2 if dtype == torch.bool else raw).view(dtype).view(3, 4),
        "odd": torch.ones(3, dtype=torch.int8),
        "empty": torch.zeros((0, 2), dtype=dtype),
        "scalar": torch.ones((), dtype=torch.float64),
    }
    zf.export_safetensors(tmp_path, tree_)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        for name, value in tree_.items():
            got = opened.get_tensor(name)
            assert got.dtype == value.dtype and got.shape == value.shape
            assert bits(got) == bits(value)
    save_file(tree_, tmp_path / "model.safetensors")
    got = zf.import_safetensors(tmp_path, tree_)
    assert {k: bits(v) for k, v in got.items()} == {k: bits(v) for k, v in tree_.items()}


def test_an_export_replaces_the_one_before_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    params = {str(i): torch.ones(100) for i in range(4)}
    files = zf.export_safetensors(tmp_path, params, shard_bytes=500)
    assert [f.name for f in files] == [
        *(f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)),
        "model.safetensors.index.json",
    ]
    zf.export_safetensors(tmp_path, params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    zf.export_safetensors(tmp_path / "one.safetensors", params)
    assert load_file(tmp_path / "one.safetensors").keys() == params.keys()
    assert (tmp_path / "model.safetensors").exists()


BROKEN = {
    "empty": lambda data: b"",
    "no file of this kind": lambda data: b"\x80\x04K\x01." * 50,
    "cut": lambda data: data[:-1],
    "endless header": lambda data: b"\xff" * 8 + data[8:],
    "no json": lambda data: data[:8] + b"[" + data[9:],
    "another dtype": lambda data: data.replace(b'"F32"', b'"F31"'),
    "another shape": lambda data: data.replace(b"[4,2]", b"[4,3]"),
    "negative": lambda data: data.replace(b"[4,2]", b"[-4]"),
    "beyond the end": lambda data: data.replace(b"[0,32]", b"[9,41]"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_files_that_are_no_safetensors(how: str, tmp_path: Path) -> None:
    zf.export_safetensors(tmp_path, {"w": torch.ones(4, 2)})
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    assert BROKEN[how](data) != data
    file.write_bytes(BROKEN[how](data))
    said = (
        r"model\.safetensors is truncated: it has \d+ bytes"
        if how == "cut"
        else r"model\.safetensors"
    )
    with pytest.raises(zf.CheckpointError, match=said):
        zf.import_safetensors(tmp_path, {"w": torch.ones(4, 2)})


def test_folders_and_indices_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match=r"holds no \*\.safetensors file"):
        zf.import_safetensors(tmp_path, {"w": torch.ones(1)})
    for text in ("{}", '{"weight_map": []}', "[", '{"weight_map": {"w": "../../x"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(zf.CheckpointError, match="is no index of shards"):
            zf.import_safetensors(tmp_path, {"w": torch.ones(1)})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone"}}')
    with pytest.raises(zf.CheckpointError, match="gone: No such file"):
        zf.import_safetensors(tmp_path, {"w": torch.ones(1)})


def test_only_tensors_are_exported(tmp_path: Path) -> None:
    with pytest.raises(zf.CheckpointError, match="n is 3, which is no tensor"):
        zf.export_safetensors(tmp_path, {"n": 3, "gap": None})


PEAK = """
n = 4_000_000  # 16 MB a layer, 128 MB in all
def make():
    layers = zf.Layers([{"w": torch.ones(n)} for _ in range(8)])
    return zf.TrainState.create({"layers": layers}, zf.optim.sgd(0.1))
step = zf.shard(zf.train_step(lambda p, b: 0, zf.optim.sgd(0.1)), stage=3, unit_bytes=1 << 25)
if sys.argv[2] == "disk":
    step = zf.offload(step, to="disk", path=sys.argv[1] + "/tier")
out = sys.argv[1] + "/out"
state = step.init(make)
zf.export_safetensors(out, {"layers": zf.Layers([{"w": torch.ones(1)}])})
before = held()
zf.export_safetensors(out, state.params)
exported = mark("VmHWM") - before
del state
like = step.init(make).params
before = held()
params = zf.import_safetensors(out, like)
print(exported, mark("VmHWM") - before)
"""


@needs_peaks
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_nobody_holds_more_than_a_unit_besides(tier: str, tmp_path: Path) -> None:
    """Besides this rank's part, that is, which on disk takes no memory."""
    exported, imported = measured(PEAK, str(tmp_path), tier)
    unit, slack = 16_000_000, 2_000_000
    assert exported < unit + slack
    assert imported < {"memory": 8 * unit, "disk": 0}[tier] + unit + slack
