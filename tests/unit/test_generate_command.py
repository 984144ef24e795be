"""``zfunc generate``: the text of ``zf.generate``, from what lies on disk."""

from __future__ import annotations

import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc as zf
from zfunc import quant
from zfunc.commands import cli
from zfunc.commands.generate_command import TokenWriter
from zfunc.commands.text_models import LOW_BIT, Storage, TextModel, open_text_model, write_config
from zfunc.files.tensorfiles import SafetensorsFiles
from zfunc.language import gpt
from zfunc.language.gpt import GPTConfig
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.quant.qtensor import QTensor

SMALL = GPTConfig(width=32, depth=2, heads=2)
PROMPT, COUNT = "import", 12


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
    quant.save(out / LOW_BIT, quant.quantize_tree(params, bits=4, group_size=16))
    return out


def save_tokenizer(folder: Path) -> None:
    """One whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unmodified model of transformers, whose tokens are bytes; its head is its embedding."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    save_tokenizer(folder)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(moved(model.state_dict()))
    model.save_pretrained(folder)
    return folder


def said(model: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command writes to standard output."""
    flags = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", str(COUNT), *words]
    assert cli.main(["generate", str(model), *flags]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def shown(ids: Tensor) -> str:
    from zfunc.commands.report import readable

    return readable(bytes(ids.tolist()).decode(errors="replace")) + "\n"


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_checkpoint_goes_on_as_its_parameters_do(
    run: Path, bits: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    params = moved(gpt.init(SMALL, zf.random.key(0)))
    words = [] if bits is None else ["--bits", str(bits), "--group-size", "16"]
    if bits is not None:
        params = quant.quantize_tree(params, bits=bits, group_size=16)
    ids = torch.tensor(list(PROMPT.encode()))
    decoder = GPTDecoder(SMALL, window=16)
    expected = zf.generate(decoder, params, ids, max_new_tokens=COUNT)[len(ids) :]
    for where in (run, run / "checkpoints", run / "checkpoints" / "step-00000003"):
        assert said(where, *words, capsys=capsys) == shown(expected)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_model_of_hugging_face_goes_on_as_transformers_says(
    llama: Path, bits: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    words = tokenizer(PROMPT, return_tensors="pt")
    if bits is None:
        out = module.generate(**words, max_new_tokens=COUNT, do_sample=False)
    else:
        model = zf.functionalize(module)
        low = quant.quantize_tree(model.params, bits, 128, model=model)
        out = zf.generate(model, low, words["input_ids"], max_new_tokens=COUNT)
    flags = [] if bits is None else ["--bits", str(bits)]
    found = said(llama, *flags, capsys=capsys)
    assert found == shown(out[0, words["input_ids"].shape[1] :].new_tensor(
        [tokenizer_byte(tokenizer, int(i)) for i in out[0, words["input_ids"].shape[1] :]]
    ))  # fmt: skip


def tokenizer_byte(tokenizer: Any, token: int) -> int:
    """The byte that a token of the byte-level alphabet stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    back = {c: b for b, c in bytes_to_unicode().items()}
    return back[tokenizer.convert_ids_to_tokens(token)]


def test_weights_are_rounded_one_by_one_while_they_are_read(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Tensor]] = []
    plain_read = SafetensorsFiles.read

    def read(self: SafetensorsFiles, name: str) -> Tensor:
        matrices = [x for ref in seen if (x := ref()) is not None and x.ndim == 2]
        assert len(matrices) <= 1 + ("embed" not in name), name  # the embedding stays as it is
        x = plain_read(self, name)
        seen.append(weakref.ref(x))
        return x

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    model = open_text_model(llama, Storage(bits=4))
    low = [x for x in zf.tree.leaves(model.params) if isinstance(x, QTensor)]
    assert len(low) == 14 and len(seen) == 20
    assert all(p.is_meta for p in zf.tree.leaves(model.decoder.params))


def test_files_without_the_prefix_of_the_head(tmp_path: Path) -> None:
    """As those of the first GPT-2 on the hub."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    body = transformers.GPT2Model(config)
    body.save_pretrained(tmp_path)
    model = zf.functionalize(transformers.GPT2LMHeadModel(config))
    params = zf.quantize(model.apply, bits=8, include="*.c_fc.weight").place(tmp_path)
    found = zf.tree.flatten_names(params)
    assert torch.equal(found["transformer.wte.weight"], body.wte.weight)
    assert isinstance(found["transformer.h.0.mlp.c_fc.weight"], QTensor)


def test_bits_that_training_has_chosen_are_taken_as_they_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where, bits in ((run, 4), (run / LOW_BIT, None), (run / LOW_BIT, 4)):
        model = open_text_model(where, Storage(bits=bits))
        assert LOW_BIT in model.said
        assert model.params["head"].format.group_size == 16  # and not 128, as for a checkpoint
    assert LOW_BIT not in open_text_model(run, Storage(bits=8)).said
    assert cli.main(["generate", str(run / LOW_BIT), "--prompt", "a", "--bits", "8"]) == 1
    assert "holds weights of 4 bits: leave --bits out" in " ".join(capsys.readouterr().err.split())


def test_a_seed_decides_what_is_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(seed: int, *more: str) -> str:
        return said(run, "--temperature", "5", "--seed", str(seed), *more, capsys=capsys)

    assert drawn(1) == drawn(1) != drawn(2)
    greedy = said(run, capsys=capsys)
    assert drawn(1, "--top-k", "1") == drawn(2, "--top-p", "1e-9") == greedy


def test_a_window_is_what_a_token_sees() -> None:
    config = GPTConfig(vocab=16, width=8, depth=1, heads=1)
    params = moved(gpt.init(config, zf.random.key(0)))
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    other = ids.clone()
    other[0, :3] = torch.tensor([7, 7, 7])

    def logits(ids: Tensor, window: int | None) -> Tensor:
        decoder = GPTDecoder(config, window=window)
        _, cache = decoder.step(params, decoder.start(1, 7, None), ids[:, :5])
        return decoder.step(params, cache, ids[:, 5:])[0]

    assert torch.equal(logits(ids, 7), logits(ids, None))
    torch.testing.assert_close(logits(ids, 4), logits(other, 4), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(logits(ids, 5), logits(other, 5), rtol=1e-6, atol=1e-6)


def test_the_shapes_are_those_of_the_parameters() -> None:
    for tied in (False, True):
        config = GPTConfig(vocab=16, width=8, depth=2, heads=1, tied=tied)
        real = zf.tree.flatten_names(gpt.init(config, zf.random.key(0)))
        blank = zf.tree.flatten_names(gpt.shapes(config))
        assert {n: x.shape for n, x in real.items()} == {n: x.shape for n, x in blank.items()}


def test_characters_come_whole_and_steer_nothing() -> None:
    model = TextModel(
        decoder=None,
        params=None,
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        stop=(0,),
        said="",
    )
    file = io.StringIO()
    writer, states = TokenWriter(file, model, [1, 2, 3]), []
    for byte in "é€\x1b[2J".encode() + b"\xff\x00":
        writer(torch.tensor([byte]))
        states.append(file.getvalue())
    assert states[:6] == ["", "é", "é", "é", "é€", "é€·"]
    writer.finish()
    assert file.getvalue() == "é€·[2J\ufffd\n" and writer.count == 11


def test_the_text_may_come_from_standard_input(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = said(run, capsys=capsys)
    for words in ([], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
        flags = ["--temperature", "0", "--max-new-tokens", str(COUNT), *words]
        assert cli.main(["generate", str(run), *flags]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prompt a --temperature -1", "temperature=-1.0: expected a number >= 0"),
        ("--prompt a --top-p 2", "top_p=2.0: expected a probability"),
        ("--prompt a --max-new-tokens 0", "--max-new-tokens: 0: expected a whole number"),
        ("--prompt a --dynamic --bits 4", "--dynamic rounds the inputs of 8-bit weights"),
        ("--prompt a --bits 3", "invalid choice: 3"),
        ("--prompt a --group-size -1", "--group-size: -1: expected a whole number, at least 0"),
        ("", "the text to continue is empty"),
    ],
)
def test_wrong_words_end_at_once(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    write_config(tmp_path, SMALL, 16)
    with pytest.raises(SystemExit) as exit:
        cli.main(["generate", str(tmp_path), *words.split()])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def _nothing(folder: Path) -> Path:
    return folder / "none"


def _no_config(folder: Path) -> Path:
    zf.export_safetensors(folder / "a" / "b" / "c", {"w": torch.ones(1)})
    return folder / "a" / "b" / "c"


def _broken_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def _no_checkpoint(folder: Path) -> Path:
    write_config(folder, SMALL, 16)
    return folder


def _no_context(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "zfunc-gpt", "width": 32}))
    return folder


def _another_width(folder: Path) -> Path:
    write_config(folder, SMALL, 16)
    zf.export_safetensors(folder, gpt.init(GPTConfig(width=64, heads=2), zf.random.key(0)))
    return folder


def _no_causal_model(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    transformers.T5Config().save_pretrained(folder)
    return folder


def _no_weights(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_nothing, "no such file or folder. `zfunc train --out DIR` writes a model"),
        (_no_config, "has no config.json, so the shape of its model is not known"),
        (_broken_config, "is no model configuration"),
        (_no_checkpoint, "is no checkpoint that zfunc can read"),
        (_no_context, "describes no GPT: KeyError('context')"),
        (_another_width, "blocks.0.down should have shape [32, 128], the checkpoint has shape [64"),
        (_no_causal_model, "transformers makes no causal language model of it"),
        (_no_weights, "holds no *.safetensors file"),
    ],
)
def test_what_is_no_model(
    make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(make(tmp_path)), "--prompt", "a"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_text_that_the_model_has_no_room_for(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(llama), "--prompt", "a" * 30]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "30 tokens of prompt and 200 new ones are more than the 40 positions" in said
    for file in llama.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    assert cli.main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "has no tokenizer (tokenizer.json)" in " ".join(capsys.readouterr().err.split())
