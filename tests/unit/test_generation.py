"""`zf.generate` against transformers' own generate, and against running the whole text again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfunc as zf
from zfunc.language import gpt
from zfunc.language.decoding import decoder_of
from zfunc.language.gpt import GPTConfig
from zfunc.language.gpt_decoding import GPTDecoder
from zfunc.language.sampling import next_token

transformers = pytest.importorskip("transformers")

SMALL = GPTConfig(vocab=11, width=24, depth=3, heads=3)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS),
    "mistral sliding": lambda: transformers.MistralConfig(**SIZES, **HEADS, sliding_window=8),
    "ministral": lambda: transformers.MinistralConfig(**SIZES, **HEADS, head_dim=8),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **HEADS, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **HEADS),
    "bloom": lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=48,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "gptneox": lambda: transformers.GPTNeoXConfig(
        **SIZES, num_attention_heads=4, vocab_size=64, max_position_embeddings=64
    ),
}


def causal(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # far from ties between tokens
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return model


def ids_of(*shape: int, vocab: int = 64) -> Tensor:
    return torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(3))


def own(model: Any, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False
        )
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_what_transformers_generates(name: str) -> None:
    model = causal(name)
    functional = zf.functionalize(model)
    ids = ids_of(3, 12)
    expected = own(model, ids, torch.ones_like(ids), 15)
    assert torch.equal(zf.generate(functional, functional.params, ids, max_new_tokens=15), expected)
    assert torch.equal(
        zf.generate(functional, functional.params, ids[1], max_new_tokens=15), expected[1]
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt"])
def test_padded_texts_are_continued_as_alone(name: str, side: str) -> None:
    functional = zf.functionalize(causal(name))
    params, texts = functional.params, [ids_of(n) for n in (5, 9, 2)]
    ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for row, text in enumerate(texts):
        part = slice(9 - len(text), 9) if side == "left" else slice(0, len(text))
        ids[row, part], mask[row, part] = text, 1
    out = zf.generate(functional, params, ids, max_new_tokens=7, attention_mask=mask)
    assert torch.equal(out[:, :9], ids)
    for row, text in enumerate(texts):
        alone = zf.generate(functional, params, text, max_new_tokens=7)
        assert torch.equal(out[row, 9:], alone[len(text) :])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_left_padding_is_what_transformers_makes_of_it(name: str) -> None:
    model = causal(name)
    functional, ids = zf.functionalize(model), ids_of(4, 9)
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [7], [2]])).long()
    ids = ids * mask
    out = zf.generate(functional, functional.params, ids, max_new_tokens=9, attention_mask=mask)
    assert torch.equal(out, own(model, ids, mask, 9))


def test_draws_do_not_depend_on_the_other_texts_of_a_batch() -> None:
    functional = zf.functionalize(causal("llama"))
    ids, how = ids_of(4, 6), {"max_new_tokens": 8, "temperature": 1.0, "top_k": 40}

    def drawn(ids: Tensor, key: Any, **more: Any) -> Tensor:
        return zf.generate(functional, functional.params, ids, key=key, **how, **more)

    whole, keys = drawn(ids, 3), zf.random.split(5, 4)
    assert torch.equal(torch.cat([drawn(ids[:1], 3), drawn(ids[1:], 3)]), whole)
    padded = torch.cat([torch.zeros(4, 2, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(8) >= 2).expand(4, 8)
    assert torch.equal(drawn(padded, 3, attention_mask=mask)[:, 2:], whole)
    each = drawn(ids, keys)
    assert torch.equal(torch.cat([drawn(ids[:2], keys[:2]), drawn(ids[2:], keys[2:])]), each)
    assert not torch.equal(each, whole)
    same = drawn(ids[:1].expand(3, 6), 3)  # one prompt several times: other texts each time
    assert torch.equal(same[:1], whole[:1]) and len(same.unique(dim=0)) == 3
    with pytest.raises(ValueError, match=r"key has shape \(4,\) for 2 texts"):
        drawn(ids[:2], keys)


def decoding(name: str) -> tuple[Any, Any]:
    """A decoder and its parameters."""
    if name == "gpt":
        return GPTDecoder(SMALL), gpt.init(SMALL, zf.random.key(0))
    functional = zf.functionalize(causal(name))
    return decoder_of(functional), functional.params


@pytest.mark.parametrize("name", ["llama", "mistral sliding", "gpt"])
def test_a_cache_stays_where_it_is_and_as_large_as_it_is(name: str) -> None:
    decoder, params = decoding(name)
    cache, held = decoder.start(2, 30, None), []
    with torch.no_grad():
        for i in range(28):
            _, cache = decoder.step(params, cache, ids_of(2, 2 if i == 0 else 1, vocab=11))
            held.append(
                [(x.data_ptr(), x.nbytes) for x in zf.tree.leaves(cache) if isinstance(x, Tensor)]
            )
    large = [[row for row in rows if row[1] > 100] for rows in held]
    assert all(rows == large[0] for rows in large) and large[0]
    assert sum(size for _, size in held[-1]) == sum(size for _, size in held[0])


def test_chunks_of_the_prompt_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = zf.functionalize(causal("llama"))
    ids = ids_of(2, 13)
    whole = zf.generate(functional, functional.params, ids, max_new_tokens=6)
    monkeypatch.setattr("zfunc.language.generation.CHUNK", 4)
    assert torch.equal(zf.generate(functional, functional.params, ids, max_new_tokens=6), whole)


def test_a_step_leaves_nothing_behind_in_the_model() -> None:
    functional = zf.functionalize(causal("llama"))
    decoder, ids = decoder_of(functional), ids_of(1, 6)
    a, _ = decoder.step(functional.params, decoder.start(1, 8, None), ids)
    b, _ = decoder.step(functional.params, decoder.start(1, 8, None), ids)
    full = functional.apply(functional.params, ids, train=False).logits[:, -1]
    assert torch.equal(a, b)
    torch.testing.assert_close(a, full, rtol=1e-5, atol=1e-5)


def test_the_gpt_with_a_cache_says_what_it_says_without() -> None:
    params = zf.tree.map(
        lambda x: x.double() + 0.3 * zf.random.normal(7, x.shape, torch.float64),
        gpt.init(SMALL, zf.random.key(0)),
    )
    ids = ids_of(2, 5, vocab=11)
    expected = ids
    for _ in range(9):
        logits = gpt.apply(params, expected, SMALL)[:, -1]
        expected = torch.cat([expected, logits.argmax(-1)[:, None]], dim=1)
    decoder = GPTDecoder(SMALL)
    assert torch.equal(zf.generate(decoder, params, ids, max_new_tokens=9), expected)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(8) >= 3).expand(2, 8)
    out = zf.generate(decoder, params, padded, max_new_tokens=9, attention_mask=mask)
    assert torch.equal(out[:, 3:], expected)


class Bigram(nn.Module):
    """No cache and no config: logits depend on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)  # type: ignore[no-any-return]


def test_any_module_that_gives_logits() -> None:
    model = zf.functionalize(Bigram())
    table, ids = model.params["table"]["weight"], torch.tensor([[3]])
    for token in zf.generate(model, model.params, ids, max_new_tokens=6)[0, 1:]:
        assert token == table[ids[0, -1]].argmax()
        ids = torch.cat([ids, token[None, None]], dim=1)


def test_placed_parameters_on_all_ranks() -> None:
    functional = zf.functionalize(causal("llama"))
    ids, tx = ids_of(2, 6), zf.optim.sgd(0.1)
    expected = zf.generate(functional, functional.params, ids, max_new_tokens=5)
    step = zf.shard(zf.train_step(lambda p, b: functional.apply(p, b).logits.mean(), tx), stage=3)

    def body() -> Tensor:
        state = step.place(zf.TrainState.create(functional.params, tx))
        return zf.generate(functional, state.params, ids, max_new_tokens=5)

    assert all(torch.equal(out, expected) for out in zf.simulate(2)(body)())


# Drawing


def shares(draws: Tensor, vocab: int) -> Tensor:
    return torch.bincount(draws, minlength=vocab) / len(draws)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"temperature": 0.5}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 1}, [2]),
        ({"top_p": 0.7}, [0, 2]),
        ({"top_p": 0.01}, [2]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2]),
    ],
)
def test_draws_follow_the_restricted_distribution(how: dict[str, Any], kept: list[int]) -> None:
    logits = torch.tensor([0.3, 0.1, 0.5, 0.1]).log() + torch.tensor([0, 1e-3, 0, 0])
    how = {"temperature": 1.0, **how}
    expected = torch.zeros(4)
    expected[kept] = (logits[kept] / how["temperature"]).softmax(0)
    draws = next_token(logits.expand(8000, 4), **how, key=zf.random.key(2))
    torch.testing.assert_close(shares(draws, 4), expected, rtol=0, atol=0.03)


def test_keys_decide_what_is_drawn() -> None:
    functional = zf.functionalize(causal("gpt2"))

    def drawn(key: int) -> Tensor:
        return zf.generate(
            functional, functional.params, ids_of(2, 4), max_new_tokens=12, temperature=1.0, key=key
        )

    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))
    one, other = drawn(0)
    assert not torch.equal(one[4:], other[4:])


def test_stopping_and_streaming() -> None:
    model = zf.functionalize(nn.Embedding(6, 6))
    params, seen = {"weight": torch.eye(6).roll(1, dims=1)}, []  # i is followed by i + 1
    ids = torch.tensor([[0], [2]])
    out = zf.generate(
        model, params, ids, max_new_tokens=50, stop=[4, 5], stream=lambda x: seen.append(x.clone())
    )
    assert out.tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 4, 4]]
    assert torch.equal(torch.stack(seen, dim=1), out[:, 1:])
    assert torch.equal(zf.generate(model, params, ids, max_new_tokens=0), ids)
    assert zf.generate(model, params, ids[0], max_new_tokens=9, stop=2).tolist() == [0, 1, 2]


# Bad input


def test_bad_settings_say_what_to_do() -> None:
    functional = zf.functionalize(causal("gpt2"))

    def run(ids: Any = None, **how: Any) -> None:
        ids = ids_of(1, 4) if ids is None else ids
        zf.generate(functional, functional.params, ids, **{"max_new_tokens": 2, **how})

    for how, word in (
        ({"temperature": 1.0}, "pass key="),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1.0, "key": 0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "key": 0, "top_p": 1.5}, "top_p=1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 61}, "64 positions .* max_new_tokens=60"),
        ({"ids": torch.tensor([[64]])}, "vocabulary has 64"),
        ({"ids": torch.tensor([[-1]])}, "between -1"),
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, "at least one token"),
        ({"ids": torch.zeros(1, 2)}, "expected integers"),
        ({"attention_mask": torch.ones(1, 3)}, "shape"),
        ({"attention_mask": torch.zeros(1, 4)}, "text 0 is nothing but padding"),
    ):
        with pytest.raises(ValueError, match=word):
            run(**how)


def test_models_that_do_not_continue_texts() -> None:
    t5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=9)
    model = zf.functionalize(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(zf.PlacementError, match="encoder-decoder"):
        zf.generate(model, model.params, ids_of(1, 2, vocab=9), max_new_tokens=1)
    image = zf.functionalize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    with pytest.raises(zf.PlacementError, match=r"does not run on token ids .* no language model"):
        zf.generate(image, image.params, ids_of(1, 2), max_new_tokens=1)
    with pytest.raises(zf.PlacementError, match="functionalize"):
        zf.generate(nn.Linear(2, 2), {}, ids_of(1, 2), max_new_tokens=1)
    bigram = zf.functionalize(Bigram())
    with pytest.raises(zf.PlacementError, match="no mask"):
        zf.generate(
            bigram,
            bigram.params,
            ids_of(1, 3, vocab=7),
            max_new_tokens=1,
            attention_mask=torch.tensor([[0, 1, 1]]),
        )


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_full_cache_takes_no_more(name: str) -> None:
    decoder, params = decoding(name)
    with torch.no_grad():
        with pytest.raises(ValueError, match="0 of its 4 positions are taken and 6 more"):
            decoder.step(params, decoder.start(1, 4, None), ids_of(1, 6, vocab=11))
        _, cache = decoder.step(params, decoder.start(1, 4, None), ids_of(1, 4, vocab=11))
        with pytest.raises(ValueError, match="the cache is full: 4 of its 4"):
            decoder.step(params, cache, ids_of(1, 1, vocab=11))


def test_a_model_without_a_head_says_so() -> None:
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    model = zf.functionalize(BertModel(BertConfig(vocab_size=97, num_hidden_layers=1, **shape)))
    with pytest.raises(zf.PlacementError, match="without logits"):
        zf.generate(model, model.params, ids_of(1, 3), max_new_tokens=1)
