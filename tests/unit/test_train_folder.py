"""``zfunc train --model``: from a Hugging Face folder to another one. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc as zf
from tests.unit.test_generate_command import save_tokenizer
from zfunc.commands import cli, report, training
from zfunc.commands.subjects import read_tokens
from zfunc.language.corpus import batch_at

transformers = pytest.importorskip("transformers")

TINY_WORDS = "--context 16 --batch 4 --steps 4 --save-every 2 --sample 8 --lr 1e-2"
TINY = TINY_WORDS.split()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = [json.dumps({"text": f"line {i} of a text, {i * i}."}) for i in range(60)]
    path.write_text("\n".join(rows) + "\n")
    return path


def run_of(llama: Path, text: Path, out: Path, *more: str) -> training.Run:
    words = ["--model", str(llama), "--data", str(text), "--out", str(out), *TINY, *more]
    return cli.run_of(cli.parser().parse_args(["train", *words]))


def test_a_folder_becomes_a_folder(
    llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--model", str(llama), "--data", str(text), "--out", str(out), "--ranks", "1"]
    assert cli.main(["train", *words, *TINY]) == 0
    said = capsys.readouterr().out
    assert "tokens to train on" in said and "perplexity" in said and "a sample" in said
    rows = report.read_rows(out / "metrics.jsonl")

    # The loss begins where the model of the folder is, on the same rows.
    corpus = read_tokens(llama, str(text), 16)
    ids = batch_at(0, corpus.train, 4, 16, 0)
    before = transformers.AutoModelForCausalLM.from_pretrained(llama)
    assert rows[0]["loss"] == pytest.approx(before(ids, labels=ids).loss.item(), rel=1e-5)
    assert rows[-1]["val_loss"] < rows[0]["loss"]

    # What was trained is read by others.
    after = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                after(corpus.heldout[a : a + 16][None]).logits[0],
                corpus.heldout[a + 1 : a + 17],
                reduction="sum",
            )
            for a in range(0, len(corpus.heldout) - 1 - 16, 16)
        ]
    counted = 16 * len(losses)
    assert sum(losses).item() / counted == pytest.approx(rows[-1]["val_loss"], rel=0.05)
    words_of = transformers.AutoTokenizer.from_pretrained
    assert words_of(out)("line 1")["input_ids"] == words_of(llama)("line 1")["input_ids"]
    assert cli.main(["generate", str(out), "--prompt", "line", "--max-new-tokens", "4"]) == 0


@pytest.mark.parametrize(
    "how", ["--stage 3", "--stage 1 --tensor 2", "--stage 0 --pipe 2 --microbatches 2"]
)
def test_ranks_train_it_together(llama: Path, text: Path, tmp_path: Path, how: str) -> None:
    def trained(ranks: int, *more: str) -> tuple[list[float], Any]:
        run = run_of(llama, text, tmp_path / str(ranks), "--ranks", str(ranks), *more)
        zf.simulate(ranks)(training.train_rank)(run)
        rows = report.read_rows(run.out / "metrics.jsonl")
        model = transformers.AutoModelForCausalLM.from_pretrained(run.out)
        return [row["loss"] for row in rows] + [rows[-1]["val_loss"]], model.state_dict()

    (alone, one), (together, two) = trained(1), trained(2, *how.split())
    assert together == pytest.approx(alone, rel=2e-5)
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, rtol=1e-3, atol=1e-5)


def test_it_is_resumed(llama: Path, text: Path, tmp_path: Path) -> None:
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    training.train_rank(run_of(llama, text, whole, "--ranks", "1"))
    short = ["--model", str(llama), "--data", str(text), "--out", str(parts), *TINY]
    saved = whole / "checkpoints" / "step-00000002"
    (parts / "checkpoints").mkdir(parents=True)
    saved.rename(parts / "checkpoints" / saved.name)
    assert cli.main(["train", *short, "--ranks", "1", "--resume"]) == 0
    ends = [report.read_rows(out / "metrics.jsonl")[-1]["val_loss"] for out in (whole, parts)]
    assert ends[0] == ends[1]


def test_without_weights_new_ones_are_trained(llama: Path, text: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    run = run_of(llama, text, tmp_path / "out", "--ranks", "1", "--steps", "1")
    with pytest.raises(zf.CheckpointError, match="is pickle"):
        training.train_rank(run)
    (llama / "pytorch_model.bin").unlink()
    losses = [training.train_rank(run)["loss"] for _ in range(2)]
    assert losses[0] == losses[1] == pytest.approx(5.5, abs=0.5)


def test_tokens_are_bytes_only_where_the_model_knows_just_these(
    llama: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in llama.glob("*token*"):
        file.unlink()
    assert read_tokens(llama, str(text), 16).train[:4].tolist() == list(b"line")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert cli.main(["train", "--model", str(llama), "--data", str(text), *TINY]) == 1
    assert "has no tokenizer (tokenizer.json)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "flags", "told"),
    [
        ('{"words": "a"}', "", 'line 1: expected an object with a field "text"'),
        ("nothing", "", 'line 1: expected an object with a field "text"'),
        ('{"text": "short"}', "", "its training part has"),
        ('{"text": "a"}', "--context 64", "this model takes 32 tokens at most"),
        ('{"text": "a"}', "--width 8", "--width with --model"),
        ('{"text": "a"}', "--quantize 4", "--quantize with --model"),
    ],
)
def test_what_means_nothing(
    llama: Path,
    tmp_path: Path,
    line: str,
    flags: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "wrong.jsonl"
    data.write_text(line + "\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--model", str(llama), "--data", str(data), *TINY, *flags.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and told in said and said.count("\n") == 1
