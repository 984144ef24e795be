"""A small Llama learns a text, and then adapters of it learn another: LoRA, and on 4 bits, QLoRA.

The base is trained on the first part of the built-in corpus. `peft` puts adapters beside its linear
layers and freezes the rest, which `zf.functionalize` honours: no gradient, no moments, no traffic
but the gathers of stage 3. With `quant.quantize_tree` the frozen weights are stored in 4 bits, and
what is gathered is what is stored. (Hu et al., LoRA, 2021; Dettmers et al., QLoRA, 2023.)

    python examples/lora_llama.py --ranks 2

Tokens are bytes. Losses are nats per byte, of text that nobody was trained on.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zfunc as zf
from zfunc import optim, quant
from zfunc.language.corpus import batch_at, read_corpus

LENGTH = 96


def parts() -> list[tuple[Tensor, Tensor]]:
    """Two parts of the corpus, each with its last tenth held out: 1-D bytes."""
    text = read_corpus().train
    cut = 2 * len(text) // 3
    return [(x[: -len(x) // 10], x[-len(x) // 10 :]) for x in (text[:cut], text[cut:])]


def rows(heldout: Tensor) -> Tensor:
    """Held-out text as a batch, ``[24, LENGTH]``."""
    return heldout[: 24 * LENGTH].view(24, LENGTH).long()


def llama(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.1,  # it is narrow, and learns for a minute
        )
    )


def adapted(base: LlamaForCausalLM) -> PeftModel:
    """The base with adapters of rank 8 beside the linear layers of its blocks."""
    torch.manual_seed(1)
    return get_peft_model(
        copy.deepcopy(base), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    )


def in_four_bits(model: zf.Functional) -> Any:
    """The parameters, the frozen ones of linear layers stored in 4 bits."""
    frozen = set(model.frozen)

    def chosen(path: str) -> bool:
        return path in frozen and "embed" not in path

    return quant.quantize_tree(model.params, 4, 32, include=chosen, model=model)


def loss_of(model: zf.Functional) -> Any:
    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        loss: Tensor = model.apply(params, ids, labels=ids).loss
        return loss

    return loss_fn


def train(
    model: zf.Functional, params: Any, text: tuple[Tensor, Tensor], steps: int, rate: float
) -> dict[str, Any]:
    """What every rank runs: the trained parameters, and what it held, sent and lost."""
    tx = optim.adamw(optim.warmup_cosine(rate, warmup=min(10, steps // 2), steps=steps))
    loss_fn = loss_of(model)
    step = zf.shard(zf.train_step(loss_fn, tx), stage=3)
    state = step.place(zf.TrainState.create(params, tx))
    test = rows(text[1])

    def heldout() -> float:
        return float(zf.pmean(zf.evaluate(loss_fn)(state.params, zf.local_batch(test))))

    before = heldout()
    for n in range(steps):
        batch = batch_at(n, text[0], 16, LENGTH - 1, seed=0)
        with zf.comm.ledger() as sent:
            state, _ = step(state, zf.local_batch(batch))
    held = zf.tree.size_bytes(state.params) + zf.tree.size_bytes(state.opt_state)
    losses = before, heldout()
    full = step.unplace(state).params
    return {"params": full, "losses": losses, "held": held, "sent": dict(sent.by_kind)}


def computed(params: Any, model: zf.Functional, ranks: int) -> float:
    """The bytes that a rank should hold: leaves as they are stored, moments where they train."""
    frozen = set(model.frozen)
    leaves = zf.tree.flatten_names(params).items()
    return sum(x.nbytes * (1 if path in frozen else 3) for path, x in leaves) / ranks


def same_bytes(before: Any, after: Any, model: zf.Functional) -> bool:
    """Whether no bit of the base has changed."""

    def stored(x: Tensor) -> Tensor:
        return x.to_bytes() if isinstance(x, quant.QTensor) else x

    old, new = zf.tree.flatten_names(before), zf.tree.flatten_names(after)
    return all(torch.equal(stored(old[path]), stored(new[path])) for path in model.frozen)


def save(module: PeftModel, params: Any, folder: str) -> int:
    """Write the adapters as peft does; their number of bytes."""
    flat = zf.tree.flatten_names(params)
    module.save_pretrained(folder, state_dict=flat, save_embedding_layers=False)
    return sum(x.nbytes for path, x in flat.items() if "lora_" in path)


def main(ranks: int, width: int, steps: int, adapt_steps: int, tokens: int) -> None:
    first, second = parts()
    model = zf.functionalize(llama(width), train=True)
    done = zf.simulate(ranks)(train)(model, model.params, first, steps, 1e-2)[0]
    print("base: held-out {:.4f} -> {:.4f}".format(*done["losses"]))
    base = model.to_module(done["params"])

    module = adapted(base)
    model = zf.functionalize(module, train=True)
    adapters = sum(
        x.nbytes for path, x in zf.tree.flatten_names(model.params).items() if "lora_" in path
    )
    print(f"adapters: {adapters:,} bytes of {zf.tree.size_bytes(model.params):,}")
    prompt = torch.tensor(list(b"The function "))[None]
    for name, params in {"LoRA": model.params, "4 bits": in_four_bits(model)}.items():
        done = zf.simulate(ranks)(train)(model, params, second, adapt_steps, 2e-2)[0]
        before, after = done["losses"]
        print(f"{name}: held-out {before:.4f} -> {after:.4f}, less by {before - after:.4f}")
        print(f"{name}: base unchanged {same_bytes(params, done['params'], model)}")
        gradients = done["sent"].get("reduce_scatter", 0)
        gathered = done["sent"].get("all_gather", 0)
        print(f"{name}: a rank sent {gradients:,} bytes of gradients, gathers of {gathered:,}")
        wanted = computed(params, model, ranks)
        print(f"{name}: a rank held {done['held']:,} bytes, computed {wanted:,.0f}")
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: saved {save(module, done['params'], folder):,} bytes of adapters")
            again = PeftModel.from_pretrained(copy.deepcopy(base), folder)
        how: Any = {"max_new_tokens": tokens, "temperature": 0.7, "key": 0}
        text = zf.generate(model, done["params"], prompt, **how)[0]
        print(f"{name}: {bytes(text.tolist()).decode(errors='replace')!r}")
        if name == "LoRA":  # the same numbers in plain torch, from the files
            ids = rows(second[1])
            with torch.no_grad():
                loss = float(again.eval()(ids, labels=ids).loss)
            print(f"{name}: the saved adapters lose {loss:.4f}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft's
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of the base (%(default)s)")
    parser.add_argument("--adapt-steps", type=int, default=100, help="of adapters (%(default)s)")
    parser.add_argument("--tokens", type=int, default=60, help="to generate (%(default)s)")
    flags = parser.parse_args()
    main(flags.ranks, flags.width, flags.steps, flags.adapt_steps, flags.tokens)
