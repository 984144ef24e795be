"""``zf.generate`` and ``zfunc generate --tensor --pipe`` on gloo ranks: texts of one process."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc import quant
from zfunc.commands import cli, generate_command
from zfunc.commands.text_models import LOW_BIT, write_config
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig

SMALL = GPTConfig(width=32, depth=2, heads=4)
WORDS = ["--prompt", "import", "--temperature", "0.7", "--max-new-tokens", "12"]


def moved(params: Any) -> Any:
    """Away from the zeros of the start, so that every weight counts."""
    return zf.tree.map(lambda x: x + 0.3 * torch.arange(x.numel()).view_as(x).sin(), params)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``zfunc train`` leaves."""
    out = tmp_path_factory.mktemp("run")
    params = moved(gpt.init(SMALL, zf.random.key(0)))
    zf.save(out / "checkpoints", {"params": params, "step": 3})
    write_config(out, SMALL, 16)
    quant.save(out / LOW_BIT, quant.quantize_tree(params, bits=4, group_size=8))
    return out


def text_of_rank(model: Path, *words: str) -> str:
    """What this rank writes, in a world that has begun."""
    found = cli.parser().parse_args(["generate", str(model), *WORDS, *words])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        generate_command._run(found, found.prompt, generate_command._storage(found))
    return out.getvalue()


@pytest.mark.parametrize(
    ("bits", "ways", "ranks"),
    [
        ([], "--tensor 2", 4),
        (["--bits", "8", "--group-size", "8"], "--tensor 2", 2),
        (["--bits", "4"], "--tensor 2", 2),
        ([], "--pipe 2", 2),
        (["--bits", "8", "--group-size", "8"], "--pipe 2 --tensor 2", 4),
        (["--bits", "4"], "--pipe 2", 2),
    ],
)
def test_ranks_write_the_text_of_one(run: Path, bits: list[str], ways: str, ranks: int) -> None:
    one = text_of_rank(run, *bits)
    words = [*ways.split(), *bits]
    first, *others = zf.launch(text_of_rank, run, *words, nprocs=ranks, timeout=120)
    assert first == one and len(one) > 3
    assert others == [""] * (ranks - 1)


@pytest.mark.parametrize(("way", "where"), [("tensor", "each"), ("pipe", "the first")])
def test_the_command_starts_its_ranks(run: Path, way: str, where: str) -> None:
    one = text_of_rank(run, "--bits", "8", "--group-size", "8")
    words = [*WORDS, "--bits", "8", "--group-size", "8", f"--{way}", "2"]
    command = [sys.executable, "-m", "zfunc", "generate", str(run), *words]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert told.stdout == one and f"on {where} of 2 ranks" in " ".join(told.stderr.split())


def test_what_does_not_fit_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run), *WORDS, "--bits", "8", "--group-size", "16", "--tensor", "4"]
    assert cli.main(words) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "falls into 2 blocks" in said and "a smaller group_size" in said


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=40,
    )
    torch.manual_seed(0)
    return zf.functionalize(transformers.LlamaForCausalLM(config).double(), train=False)


def texts(model: Any, params: Any) -> list[Tensor]:
    ids = torch.arange(10).view(2, 5)
    drawn = {"temperature": 1.0, "key": 3}
    return [zf.generate(model, params, ids, max_new_tokens=8, **how) for how in ({}, drawn)]


LOW: Any = {"bits": 8, "group_size": 8, "dynamic": True}


def ranks_texts(folder: Path | None, way: str) -> list[Tensor]:
    model = llama()
    fn = model.apply if folder is None else zf.quantize(model.apply, **LOW)
    predict = zf.split(fn, model, tensor=2) if way == "split" else zf.pipeline(fn, 2, pipe=2)
    return texts(model, predict.place(folder or model.params))


@pytest.mark.parametrize("way", ["split", "pipeline"])
@pytest.mark.parametrize("low", [False, True])
def test_models_of_hugging_face_go_on_as_in_one_process(
    tmp_path: Path, low: bool, way: str
) -> None:
    model = llama()
    params = model.params
    if low:
        zf.export_safetensors(tmp_path, params)
        params = zf.quantize(model.apply, **LOW).place(tmp_path)
    expected = texts(model, params)
    for mine in zf.launch(ranks_texts, tmp_path if low else None, way, nprocs=2, timeout=120):
        assert all(map(torch.equal, mine, expected))
