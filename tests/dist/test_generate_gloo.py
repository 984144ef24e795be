"""``zf.generate`` and ``zfunc generate --tensor --pipe`` on gloo ranks: texts of one process."""

from __future__ import annotations

import contextlib
import io
import itertools
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


LOW_BITS: dict[str, list[str]] = {
    "16": [],
    "8": ["--bits", "8", "--group-size", "8"],
    "4": ["--bits", "4"],
}
# Of each world: bits, and what its ranks share.
WAYS = {
    2: [("8", "--tensor 2"), ("4", "--tensor 2"), ("16", "--pipe 2"), ("4", "--pipe 2")],
    4: [("16", "--tensor 2"), ("8", "--pipe 2 --tensor 2")],
}


def texts_of_rank(model: Path, ranks: int) -> list[str]:
    return [text_of_rank(model, *ways.split(), *LOW_BITS[bits]) for bits, ways in WAYS[ranks]]


@pytest.mark.parametrize("ranks", WAYS)
def test_ranks_write_the_text_of_one(run: Path, ranks: int) -> None:
    first, *others = zf.launch(texts_of_rank, run, ranks, nprocs=ranks, timeout=120)
    for (bits, ways), text in zip(WAYS[ranks], first, strict=True):
        one = text_of_rank(run, *LOW_BITS[bits])
        assert text == one and len(one) > 3, (bits, ways)
    assert others == [[""] * len(first)] * (ranks - 1)


def test_the_command_starts_its_ranks(run: Path) -> None:
    """As users start it, and where all that a process imports is new."""
    one = text_of_rank(run, *LOW_BITS["8"])
    words = [*WORDS, *LOW_BITS["8"], "--tensor", "2"]
    command = [sys.executable, "-m", "zfunc", "generate", str(run), *words]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert told.stdout == one and "on each of 2 ranks" in " ".join(told.stderr.split())


def test_the_command_starts_its_stages(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = text_of_rank(run, *LOW_BITS["8"])
    assert cli.main(["generate", str(run), *WORDS, *LOW_BITS["8"], "--pipe", "2"]) == 0
    out, said = capfd.readouterr()
    assert out == one and "on the first of 2 ranks" in " ".join(said.split())


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


CASES = list(itertools.product(["split", "pipeline"], [False, True]))


def ranks_texts(folder: Path) -> list[list[Tensor]]:
    """In each case: each rank imports transformers, which takes longer than all of them."""
    model, found = llama(), []
    for way, low in CASES:
        fn = zf.quantize(model.apply, **LOW) if low else model.apply
        predict = zf.split(fn, model, tensor=2) if way == "split" else zf.pipeline(fn, 2, pipe=2)
        found.append(texts(model, predict.place(folder if low else model.params)))
    return found


def test_models_of_hugging_face_go_on_as_in_one_process(tmp_path: Path) -> None:
    model = llama()
    zf.export_safetensors(tmp_path, model.params)
    low_bit = zf.quantize(model.apply, **LOW).place(tmp_path)
    expected = {low: texts(model, low_bit if low else model.params) for low in (False, True)}
    for rank, mine in enumerate(zf.launch(ranks_texts, tmp_path, nprocs=2, timeout=120)):
        for (way, low), found in zip(CASES, mine, strict=True):
            assert all(map(torch.equal, found, expected[low])), (way, low, rank)
