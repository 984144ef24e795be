"""A table of every causal family of transformers, made small and split over ranks.

python -m tests.laws.zoo --ways 2

Logits and the gradient of every leaf are compared with one process, in float64, to 1e-9 of the
leaf's largest gradient (``tests.laws.planned.check``).
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import zfunc as zf
from tests.laws.planned import check, share_split
from zfunc.modules.functional import Functional
from zfunc.probing.plans import plan_of

LARGEST = 30_000_000  # parameters of a model that is tried
FOUR = "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts "
FOUR += "num_local_experts n_routed_experts encoder_attention_heads index_topk mamba_n_heads "
FOUR += "mamba_n_groups rotary_dim state_size attention_window moe_num_experts qk_rope_head_dim"
TWO = "num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_kv_heads moe_topk "
TWO += "decoder_layers encoder_layers num_experts_per_tok index_n_heads"
WIDE = "hidden_size n_embd d_model word_embed_proj_dim dim attention_hidden_size embedding_size "
WIDE += "emb_dim lru_width"
INNER = "intermediate_size ffn_dim d_inner d_ff decoder_ffn_dim encoder_ffn_dim hidden_dim "
INNER += "ffn_hidden_size"
ONE = "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts"
SMALL: dict[str, int] = {
    **dict.fromkeys(FOUR.split(), 4),
    **dict.fromkeys(TWO.split(), 2),
    **dict.fromkeys(WIDE.split(), 48),
    **dict.fromkeys(INNER.split(), 80),
    **dict.fromkeys(ONE.split(), 1),
    **dict.fromkeys(["head_dim", "d_kv", "kv_lora_rank", "v_head_dim"], 12),
    **dict.fromkeys(["n_positions", "max_position_embeddings", "max_seq_len"], 64),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size", "mamba_d_head"], 24),
    **dict.fromkeys(["qk_nope_head_dim", "num_buckets", "index_head_dim", "mamba_d_state"], 8),
    "shared_expert_intermediate_size": 40,
    "q_lora_rank": 16,
    "vocab_size": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Unmade(Exception):
    """A family of which no small model can be made, with the reason."""


def small(kind: type[Any]) -> Any:
    """A configuration of a model's class with two layers, four heads and small widths."""
    base = kind.config_class()
    if hasattr(base, "text_config"):
        raise Unmade("composite")
    sizes: dict[str, Any] = {
        key: value
        for key, value in SMALL.items()
        if hasattr(base, key) and (getattr(base, key) is None or type(getattr(base, key)) is int)
    }
    for key in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types"):
        known = getattr(base, key, None)
        if isinstance(known, list) and known and isinstance(known[0], str):
            sizes[key] = ([*dict.fromkeys(known)] * 2)[:2]
    try:
        return kind.config_class(**sizes)
    except Exception:  # whatever a configuration objects to: to heads of this size, mostly
        sizes.pop("head_dim", None)
        try:
            return kind.config_class(**sizes)
        except Exception as error:
            raise Unmade(f"no small configuration ({type(error).__name__})") from None


def made(kind: type[Any]) -> Functional:
    """A small model in float64, whose biases and norms matter, too."""
    config = small(kind)
    with torch.device("meta"):
        if sum(p.numel() for p in kind(config).parameters()) > LARGEST:
            raise Unmade("too large")
    torch.manual_seed(0)
    module = kind(config).double().eval()
    for part in module.modules():
        if getattr(getattr(part, "config", None), "_experts_implementation", None) is not None:
            part.config._experts_implementation = "eager"  # the others have no float64
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.05 * torch.randn_like(p) * (p.ndim == 1))
    return zf.functionalize(module, train=False)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Unmade(f"takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def row(family: str, kind: type[Any], ways: int) -> tuple[float | None, str]:
    """How much of a family's layers is split, if it could be made, and a line of the table."""
    try:
        with at_most(90):
            model = made(kind)
            ids = torch.randint(3, 60, (3, 8), generator=torch.Generator().manual_seed(3))
            batch: dict[str, Any] = {"input_ids": ids}
            if "use_cache" in model.signature.parameters:
                batch["use_cache"] = False
            try:
                model.apply(model.params, **batch)
            except Exception as error:
                raise Unmade(f"the whole model does not run ({type(error).__name__})") from None
            plan = plan_of(model, ways)
            check(model, plan, batch)
    except Unmade as reason:
        return None, f"| {family} | | {reason} |"
    except AssertionError as error:
        return 0.0, f"| {family} | **wrong** | {str(error).splitlines()[0]} |"
    share = share_split(model, plan)
    reasons = "; ".join(dict.fromkeys(f"{k.split('.', 3)[-1]}: {v}" for k, v in plan.whole.items()))
    return share, f"| {family} | {share:.0%} | {reasons[:160] if share < 0.9 else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", type=int, default=2, help="ranks (%(default)s)")
    parser.add_argument("families", nargs="*", help="some of them; all by default")
    flags = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print(
        f"transformers {version('transformers')}, torch {torch.__version__}, {flags.ways} ranks\n"
    )
    print("| family | of its layers' parameters split | left whole |\n|---|---|---|")
    shares = []
    for family, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        if (flags.families and family not in flags.families) or not hasattr(transformers, name):
            continue
        share, line = row(family, getattr(transformers, name), flags.ways)
        print(line, flush=True)
        shares += [] if share is None else [share]
        print(f"{len(shares)} compared", end="\r", file=sys.stderr)
    most = sum(share >= 0.9 for share in shares)
    print(f"\n{len(shares)} families compared; {most} have 90 % of their layers split or more.")


if __name__ == "__main__":
    main()
