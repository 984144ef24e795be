"""A table of every causal family of transformers, made small and split over ranks.

python -m tests.laws.zoo                        over 2 ranks, on the terminal
python -m tests.laws.zoo --ways 4 --kv 1        4 ranks, one head of keys and values
python -m tests.laws.zoo --write docs/families.md     all three tables, there and in families-4.md
python -m tests.laws.zoo --write docs/families.md llama     a row in them, on the same day

Logits, the gradient of every leaf and the norm of all of them are compared with one process, in
float64, to 1e-9 of the leaf's largest gradient (``tests.laws.planned.check``). It ends with an
error if a family is wrong, or if one of ``COMPLETE`` is no longer split completely.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import zfunc as zf
from tests.laws.planned import check, share_split
from zfunc.errors import PlacementError
from zfunc.modules.functional import Functional
from zfunc.probing.exactness import Doubled
from zfunc.probing.plans import plan_of

# Split completely by the study that ``split`` is built after: they are to stay so.
COMPLETE = (
    "llama mistral qwen2 qwen3 phi3 phi gemma2 gemma3_text glm cohere gpt_neox gptj gpt2 opt "
)
COMPLETE += "falcon gpt_bigcode stablelm starcoder2 granite bert nemotron smollm3 mixtral"
TYPES = ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types", "block_types")
KV = ("num_key_value_heads", "num_kv_heads")
COMPLETELY = 0.97  # all but norms, and biases of rows
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


def sizes_of(base: Any, kv: int) -> dict[str, Any]:
    """Two layers, four heads and small widths, of what a configuration has."""
    found: dict[str, Any] = {}
    for key, value in SMALL.items():
        known = _known(base, key)
        if type(known) is int or (known is None and key in dir(base)):
            found[key] = kv if key in KV else value
    for key in TYPES:
        known = _known(base, key)
        if isinstance(known, list) and known and isinstance(known[0], str):
            found[key] = ([*dict.fromkeys(known)] * 2)[:2]
    return found


def _takes(config: type[Any], key: str, value: Any) -> bool:
    try:
        config(**{key: value})
    except Exception:  # it follows from others, say
        return False
    return True


def _known(base: Any, key: str) -> Any:
    try:
        return getattr(base, key, None)
    except Exception:  # some differ from layer to layer, and say so
        return None


def configurations(kind: type[Any], kv: int, strict: bool) -> Iterator[Any]:
    """Small ones, of which a model may accept one: they object to all kinds of sizes.

    ``strict``: they have as many heads of keys and values as is asked for.
    """
    try:
        base = kind.config_class()
    except Exception as error:
        raise Unmade(f"no configuration ({type(error).__name__})") from None
    if hasattr(base, "text_config"):
        raise Unmade("composite")
    sizes = sizes_of(base, kv)
    without: list[set[str]] = [set(), {"head_dim"}, {*TYPES}, {*TYPES, "head_dim"}]
    without += [] if strict else [{*KV}, {*KV, "head_dim"}]
    refused = {key for key, x in sizes.items() if not _takes(kind.config_class, key, x)}
    for wide, left in [*product((48, 64), without), (48, refused), (64, refused)]:
        each = {key: wide if key in WIDE.split() else x for key, x in sizes.items()}
        try:
            yield kind.config_class(**{key: x for key, x in each.items() if key not in left})
        except Exception:  # another one
            continue


def made(kind: type[Any], kv: int, strict: bool = False) -> tuple[Functional, dict[str, Any]]:
    """A small model in float64, whose biases and norms matter, too; and what it is given."""
    failed: Exception | None = None
    for config in configurations(kind, kv, strict):
        try:
            model = _model(kind, config)
            return model, _batch(model)
        except Unmade:
            raise
        except Exception as error:  # the model's own code: this configuration is none of its own
            failed = failed or error
    raise Unmade(f"no small model ({type(failed).__name__})") from failed


def _model(kind: type[Any], config: Any) -> Functional:
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


def _batch(model: Functional) -> dict[str, Any]:
    """Ids, and states of an encoder where the model takes some: it runs on these."""
    generator = torch.Generator().manual_seed(3)
    named = model.signature.parameters
    batch: dict[str, Any] = {"input_ids": torch.randint(3, 60, (3, 8), generator=generator)}
    if "use_cache" in named:
        batch["use_cache"] = False
    tables = [x for x in model._pool.skeleton.modules() if isinstance(x, nn.Embedding)]
    with torch.no_grad(), Doubled():
        if "encoder_hidden_states" in named and tables:
            states = torch.randn(3, 6, tables[0].embedding_dim, generator=generator)
            more = {**batch, "encoder_hidden_states": states.double()}
            try:
                model.apply(model.params, **more)
            except Exception:  # it is no decoder
                pass
            else:
                return more
        model.apply(model.params, **batch)
    return batch


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


@dataclass
class Row:
    """What became of a family.

    Attributes:
        share: of its layers' parameters that is split, to 1 %; None if it could not be made.
        said: why not all, or why it could not be made.
        wrong: what differs from one process; empty if nothing does.
        published: what the model's own plan, of transformers, says otherwise: empty if it has none,
            None where that is not asked.
    """

    family: str
    share: float | None = None
    said: str = ""
    wrong: str = ""
    published: str | None = None

    @property
    def cells(self) -> str:
        """What a table says beside its name."""
        share = "" if self.share is None else f"{self.share:.0%}"
        cells = [WRONG if self.wrong else share, self.wrong or self.said]
        cells += [] if self.published is None else [self.published]
        return " | ".join(x.replace("|", "/") for x in cells)

    def __str__(self) -> str:
        return f"| {self.family} | {self.cells} |"


def row(family: str, kind: type[Any], ways: int, kv: int, seconds: int) -> Row:
    """One family, made, planned and compared."""
    try:
        with at_most(seconds):
            model, batch = made(kind, kv, strict=ways != 2)
            try:
                plan = plan_of(model, ways)
            except PlacementError as error:
                return Row(family, 0.0, f"no plan: {error}")
            check(model, plan, batch)
    except Unmade as reason:
        return Row(family, said=str(reason))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Row(family, 0.0, wrong=f"{type(error).__name__}: {first}")
    share = round(share_split(model, plan), 2)
    said = _reasons(plan.whole) if share < 0.9 else ""
    own = getattr(model._pool.skeleton, "_tp_plan", None)
    published = (_reasons(plan.otherwise) or SAME) if own else ""
    return Row(family, share, said, published=published if ways == 2 else None)


def _reasons(whole: Mapping[str, str]) -> str:
    """Each reason once, with the submodules of the first layer of which it is said."""
    found: dict[str, list[str]] = {}
    for name, why in whole.items():
        last = ".".join(name.split(".")[-2:])
        if last not in found.setdefault(why, []):
            found[why].append(last)
    return "; ".join(f"{', '.join(names[:4])}: {why}" for why, names in found.items())[:400]


WRONG, UNMADE, SAME = "**wrong**", "Not compared", "same"
ROW = re.compile(r"\| ([^|]+) \| (\d+%|\*\*wrong\*\*) \| (.*?) ?\|(?: (.*?) ?\|)?")


def by_name(row: Row) -> str:
    return row.family


@dataclass
class Table:
    """All families over so many ranks."""

    ways: int
    kv: int
    rows: list[Row] = field(default_factory=list)

    def fill(self, some: Sequence[str], seconds: int) -> None:
        for family, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
            name = names if isinstance(names, str) else names[0]
            kind = getattr(transformers, name, None)
            if kind is None or (some and family not in some) or not self._asked(kind):
                continue
            tried = row(family, kind, self.ways, self.kv, seconds)
            self.rows = sorted([x for x in self.rows if x.family != family] + [tried], key=by_name)
            print(tried, flush=True)

    def read(self, text: str) -> None:
        """The rows of a table that was written."""
        for line in text.splitlines():
            if found := ROW.fullmatch(line):
                families, share, said, published = found.groups()
                wrong = said if share == WRONG else ""
                known = 0.0 if wrong else int(share.removesuffix("%")) / 100
                told = (known, "" if wrong else said, wrong, published)
                self.rows += [Row(family, *told) for family in families.split(", ")]
        unmade = text.partition(UNMADE)[2].partition(": ")[2].strip().removesuffix(".")
        for one in unmade.split("; "):
            family, _, said = one.partition(" (")
            if said:
                self.rows.append(Row(family, said=said.removesuffix(")")))

    def _asked(self, kind: type[Any]) -> bool:
        """With other numbers of heads of keys and values only what has such a number."""
        if self.ways == 2:
            return True
        try:
            base = kind.config_class()
        except Exception:  # the first table says so
            return False
        return any(_known(base, key) is not None for key in (*KV, "multi_query"))

    @property
    def compared(self) -> list[Row]:
        return [x for x in self.rows if x.share is not None]

    @property
    def wrong(self) -> list[str]:
        asked = [x for x in self.rows if x.family in COMPLETE.split()]
        fallen = [x.family for x in asked if x.share is None or x.share < COMPLETELY]
        return [x.family for x in self.rows if x.wrong] + fallen

    def __str__(self) -> str:
        most = sum(x.share >= 0.9 for x in self.compared if x.share is not None)
        unmade = [x for x in self.rows if x.share is None]
        own = [x for x in self.compared if x.published]
        lines = ["| families | of their layers' parameters split | left whole |", "|---|---|---|"]
        if self.ways == 2:
            lines = [f"{lines[0]} plan of its own |", f"{lines[1]}---|"]
        alike: dict[str, list[str]] = {}
        for x in self.compared:
            alike.setdefault(x.cells, []).append(x.family)
        lines += [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]
        wrong, same = sum(bool(x.wrong) for x in self.rows), [x for x in own if x.published == SAME]
        lines += ["", f"{len(self.compared)} families compared: {most} have 90 % of their layers' "]
        lines[-1] += f"parameters split or more, {wrong} are wrong."
        if own:
            lines[-1] += f" {len(own)} have a plan of their own in transformers: {len(same)} of "
            lines[-1] += "these say the same."
        if unmade:
            told = "; ".join(f"{x.family} ({x.said})" for x in unmade)
            lines += ["", f"{UNMADE}, {len(unmade)}: {told}."]
        return "\n".join(lines)


PAGE = """# Families that `split` has tried

Every causal language model of transformers of which a small configuration can be made, split as
it is ([how](tensor.md)). In float64, logits, the gradient of every leaf (to 1e-9 of that leaf's
largest) and the norm of all gradients are those of one process. Written by

    python -m tests.laws.zoo --write docs/families.md

on {date}, with {versions}.

A part that stays whole is computed alike on all ranks: right, and slower than it might be. The
reasons are those that `zf.split.plan` gives. A plan that transformers itself has for a family is
compared with the one that is found over 2 ranks: the last column there says what differs, of those
submodules and leaves of which that plan says that they are split. [Over 4 ranks](families-4.md)
are those with 1 and 2 heads of keys and values.
"""
MORE = """# Families that `split` has tried, over 4 ranks

Those that have a number of heads of keys and values, on the day, with the versions and by the
command of [those over 2 ranks](families.md), which says how they are compared.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", type=int, default=2, help="ranks (%(default)s)")
    parser.add_argument("--kv", type=int, default=2, help="heads of keys and values (%(default)s)")
    parser.add_argument("--seconds", type=int, default=300, help="for one family (%(default)s)")
    parser.add_argument("--write", type=Path, help="a page with all tables")
    parser.add_argument("families", nargs="*", help="some of them; all by default")
    flags = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    places = [(2, 2), (4, 2), (4, 1)] if flags.write else [(flags.ways, flags.kv)]
    tables = [Table(*place) for place in places]
    text = PAGE.format(date=datetime.date.today(), versions=versions())
    pages = [flags.write, flags.write.with_name(f"{flags.write.stem}-4.md")] if flags.write else []
    if flags.families:
        before = [part for page in pages for part in page.read_text().split("\n## ")]
        if pages and before.pop(0).rstrip() != text.rstrip():
            sys.exit(f"{flags.write} is of another day, or of other versions: write all of it")
        for table, part in zip(tables, before[:1] + before[2:], strict=False):
            table.read(part)
    sections = []
    for table in tables:
        table.fill(flags.families, flags.seconds)
        heads = f"{table.kv} head{'s' * (table.kv > 1)} of keys and values"
        heading = "## Over 2 ranks" if table.ways == 2 else f"## Over {table.ways} ranks, {heads}"
        sections.append(f"\n{heading}\n\n{table}\n")
        print(f"\n{str(table).rpartition('|')[2].strip()}\n")
    for page, head, part in zip(pages, (text, MORE), (sections[:1], sections[1:]), strict=False):
        page.write_text(head + "".join(part))
    if wrong := [family for table in tables for family in table.wrong]:
        sys.exit(f"wrong, or no longer split completely: {', '.join(wrong)}")


def versions() -> str:
    return f"transformers {version('transformers')} and torch {torch.__version__}"


if __name__ == "__main__":
    main()
