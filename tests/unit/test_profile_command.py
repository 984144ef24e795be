"""``zfunc profile``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zfunc.commands import cli
from zfunc.commands.text_models import write_config
from zfunc.language.gpt import GPTConfig

TINY = ["profile", "--batch", "2", "--context", "8", "--warmup", "1"]


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_the_gpt_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, GPTConfig(width=16, depth=2, heads=2), 8)
    words = f"--model {tmp_path} --remat --precision bf16 --depth 2".split()
    files = f"--json {tmp_path}/seen.json --chrome {tmp_path}/made/trace.json".split()
    assert cli.main([*TINY, *words, *files]) == 0
    told = json.loads((tmp_path / "seen.json").read_text())
    assert told["modules"]["blocks.1"]["forward"] == 2 * 16 * (12 * 16 * 16 + 2 * 8 * 16)
    assert told["modules"]["blocks.1"]["recomputed"] > 0
    assert json.loads((tmp_path / "made" / "trace.json").read_text())["traceEvents"]
    out = capsys.readouterr().out
    assert "FLOPs forward" in out and "blocks" in out


def test_a_configuration_of_hugging_face_suffices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config: Any = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert cli.main([*TINY, "--model", str(tmp_path), "--depth", "5", "--stage", "1"]) == 0
    assert "gate_proj" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--batch 3 --accumulate 2", "multiple of 2"),
        ("--depth -1", "--depth: -1: expected a whole number, at least 0"),
        ("--warmup 0", "--warmup: 0: expected a whole number, at least 1"),
    ],
)
def test_what_means_nothing(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", *words.split()])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
