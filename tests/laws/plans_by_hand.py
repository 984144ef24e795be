"""Plans of how small Hugging Face models are split, written by hand, and runs with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import zfunc as zf
from tests.laws.architectures import GPT, GROUPED, LENGTH, STILL, TEXT, VOCAB, built
from zfunc.engine.step import as_step
from zfunc.layout.splits import Cut, Part, Split, mark
from zfunc.modules.split_plans import Role, SplitPlan
from zfunc.modules.units import TensorInfo
from zfunc.ranks.comm import even_cuts
from zfunc.transforms.splitting import Splitting

HEAD_DIM = 4


class Wide(TorchFunctionMode):
    """A model's own casts to float32 become casts to float64, so that nothing is rounded away."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return func.__self__ if not args else args[0].double()

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(wide, args), **{key: wide(x) for key, x in kwargs.items()})


def widened(module: Any) -> Any:
    """The module in float64, whose innermost parts of Hugging Face's run so in backward, too."""
    for part in module.modules():
        kind = type(part)
        if not part._modules and not kind.__module__.startswith("torch."):
            part.__class__ = type(kind.__name__, (kind,), {"forward": _wide(kind.forward)})
    return module.double()


def _wide(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Wide():
            return plain(self, *args, **kwargs)

    return forward


def blocks(n: int, size: int, ways: int) -> list[list[int]]:
    """``n`` blocks of so many indices over ranks, longer parts first."""
    ends = even_cuts(n, ways)
    return [list(range(a * size, b * size)) for a, b in pairwise(ends)]


def llama(heads: int = 4, kv: int = 2, **more: Any) -> Any:
    """A Llama in float64 with grouped keys and values."""
    settings = {
        **TEXT,
        "hidden_size": 24,
        "intermediate_size": 10,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": HEAD_DIM,
        **more,
    }
    torch.manual_seed(0)
    return widened(spread(built("LlamaForCausalLM", **settings)))


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    model = built("GPT2LMHeadModel", **{**GPT, **STILL, "n_head": 4, "n_positions": 32, **more})
    return widened(spread(model))


def spread(module: Any) -> Any:
    """Norms and biases away from 1 and 0, so that each of them matters."""
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape) * 0.2)
    return module


def shared_heads(heads: int, kv: int, ways: int) -> list[list[int]]:
    """Keys and values of which each rank has those that its queries read."""
    queries = blocks(heads, 1, ways)
    group = heads // kv
    return [sorted({q // group for q in row}) for row in queries]


def llama_plan(config: Any, ways: int, vocab: bool = True) -> SplitPlan:
    heads, kv, wide = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
    )
    many = kv >= ways and heads % kv == 0
    owners = blocks(kv, 1, ways) if many else shared_heads(heads, kv, ways)
    group = heads // kv
    queries = (
        [[q for k in row for q in range(k * group, (k + 1) * group)] for row in owners]
        if many
        else blocks(heads, 1, ways)
    )
    q_rows, kv_rows, up = expanded(queries), expanded(owners), blocks(wide, 1, ways)
    splits: dict[str, Split] = {}
    roles: dict[str, Role] = {}
    attributes = {}
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        column = {f"{attention}.{name}": of for name, of in rows.items()}
        column |= {f"{mlp}.{name}": up for name in ("gate_proj", "up_proj")}
        row = {f"{attention}.o_proj": q_rows, f"{mlp}.down_proj": up}
        for name, table in column.items():
            splits[f"{name}.weight"] = Split.of(0, table)
            roles[name] = Role.COLUMN
            if config.attention_bias and "attn" in name:
                splits[f"{name}.bias"] = Split.of(0, table)
        for name, table in row.items():
            splits[f"{name}.weight"] = Split.of(1, table)
            roles[name] = Role.ROW
        attributes[attention] = {
            "num_key_value_groups": tuple(
                len(q) // len(k) for q, k in zip(queries, owners, strict=True)
            )
        }
    if vocab:
        table = Cut(0).split((config.vocab_size, config.hidden_size), ways)
        splits["model.embed_tokens.weight"] = table
        if not config.tie_word_embeddings:
            splits["lm_head.weight"] = table
        roles |= {"model.embed_tokens": Role.EMBED, "lm_head": Role.HEAD}
    return SplitPlan(ways, splits, roles, attributes)


def expanded(heads: Sequence[Iterable[int]]) -> list[list[int]]:
    return [[h * HEAD_DIM + i for h in row for i in range(HEAD_DIM)] for row in heads]


def gpt2_plan(config: Any, ways: int) -> SplitPlan:
    width, heads = config.n_embd, config.n_head
    qkv, bias = (Cut(d, parts=3, by=heads) for d in (1, 0))
    splits: dict[str, Split] = {
        "transformer.wte.weight": Cut(0).split((config.vocab_size, width), ways)
    }
    roles = {"transformer.wte": Role.EMBED, "lm_head": Role.HEAD}
    attributes = {}
    for i in range(config.n_layer):
        name = f"transformer.h.{i}"
        splits |= {
            f"{name}.attn.c_attn.weight": qkv.split((width, 3 * width), ways),
            f"{name}.attn.c_attn.bias": bias.split((3 * width,), ways),
            f"{name}.attn.c_proj.weight": Cut(0, by=heads).split((width, width), ways),
            f"{name}.mlp.c_fc.weight": Cut(1).split((width, 4 * width), ways),
            f"{name}.mlp.c_fc.bias": Cut(0).split((4 * width,), ways),
            f"{name}.mlp.c_proj.weight": Cut(0).split((4 * width, width), ways),
        }
        roles |= dict.fromkeys((f"{name}.attn.c_attn", f"{name}.mlp.c_fc"), Role.COLUMN)
        roles |= dict.fromkeys((f"{name}.attn.c_proj", f"{name}.mlp.c_proj"), Role.ROW)
        local = splits[f"{name}.attn.c_proj.weight"]
        attributes[f"{name}.attn"] = {"split_size": tuple(map(local.width, range(ways)))}
    return SplitPlan(ways, splits, roles, attributes)


def qwen3(kv: int = 2) -> Any:
    """Heads have norms, whose weights lie between the products."""
    torch.manual_seed(0)
    settings = {**GROUPED, "num_attention_heads": 4, "head_dim": 4, "num_key_value_heads": kv}
    return widened(spread(built("Qwen3ForCausalLM", **settings)))


def qwen3_plan(config: Any, ways: int) -> SplitPlan:
    plan = llama_plan(config, ways)
    norms = [
        f"model.layers.{i}.self_attn.{x}_norm"
        for i in range(config.num_hidden_layers)
        for x in "qk"
    ]
    return replace(plan, roles={**plan.roles, **dict.fromkeys(norms, Role.BETWEEN)})


def mixtral() -> Any:
    """Experts whose products are leaves of three dimensions."""
    torch.manual_seed(0)
    settings = {**GROUPED, "num_local_experts": 4, "intermediate_size": 6}
    module = widened(spread(built("MixtralForCausalLM", **settings)))
    module.config._experts_implementation = "eager"  # the grouped product has no float64
    return module


def mixtral_plan(config: Any, ways: int) -> SplitPlan:
    n, wide, width = config.num_local_experts, config.intermediate_size, config.hidden_size
    splits: dict[str, Split] = {}
    roles = {f"model.layers.{i}.mlp.experts": Role.NETWORK for i in range(config.num_hidden_layers)}
    for name in roles:
        splits[f"{name}.gate_up_proj"] = Cut(1, parts=2).split((n, 2 * wide, width), ways)
        splits[f"{name}.down_proj"] = Cut(2).split((n, width, wide), ways)
    return SplitPlan(ways, splits, roles)


def local_params(model: Any, full: dict[str, Tensor], plan: SplitPlan, rank: int) -> Any:
    """The params tree of a rank: its part of each leaf, differentiable, which says what it is."""
    mesh = zf.mesh(data=1, tensor=plan.ways)

    def own(leaf: TensorInfo) -> Tensor:
        split = plan.splits.get(leaf.name)
        x = full[leaf.name] if split is None else split.local(full[leaf.name], rank)
        return mark(x.detach().clone().requires_grad_(), Part(split, mesh, "tensor", plan))

    anatomy = model._pool.anatomy
    return anatomy.tree({leaf.name: own(leaf) for leaf in anatomy.leaves})


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def tokens(seed: int = 1, batch: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class ByPlan(Splitting):
    """``split`` by a plan that is given."""

    given: Any = field(default=None, compare=False, repr=False)

    def plan(self) -> SplitPlan:
        found: SplitPlan = self.given
        return found


def split_step(step: Any, plan: SplitPlan, stage: int = 0, data: int = 1) -> Any:
    mesh = zf.mesh(data=data, tensor=plan.ways)
    return zf.shard(as_step(step).wrap(ByPlan(mesh=mesh, given=plan)), stage=stage, mesh=mesh)
