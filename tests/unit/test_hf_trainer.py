"""``zf.hf`` in one process: the table of training arguments, what is refused, weights that go and
come back, optimizers beside torch's. ``tests/dist`` has the ranks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

import zfunc as zf
from tests.dist.trainer_runs import Tokens, model_of
from zfunc.errors import CheckpointError, CompositionError, PlacementError
from zfunc.hf.fields import HONOURED, MEANINGLESS, REFUSED, check_fields
from zfunc.hf.optimizers import optimizer_for

TABLES = (HONOURED, MEANINGLESS, REFUSED)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error"}
    return TrainingArguments(
        output_dir=str(folder), **quiet, **{"max_steps": 2, "save_strategy": "no", **changes}
    )


def trainer(folder: Path, kind: Any = None, model: Any = None, **given: Any) -> Any:
    changes = given.pop("args", {})
    made = (kind or zf.hf.Trainer)(
        model=model_of("llama") if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=Tokens("llama", 16, 1),
        eval_dataset=Tokens("llama", 4, 2),
        **given,
    )
    made.pop_callback(transformers.PrinterCallback)
    return made


def test_every_field_is_in_one_of_the_tables() -> None:
    fields = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert fields <= set().union(*TABLES)
    assert sum(map(len, TABLES)) == len(set().union(*TABLES))


def test_the_page_has_the_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text()
    for kind, table in zip(("honoured", "meaningless", "refused"), TABLES, strict=True):
        by_text: dict[str, list[str]] = {}
        for name, text in table.items():
            by_text.setdefault(text, []).append(f"`{name}`")
        for text, names in by_text.items():
            assert f"| {', '.join(names)} | {kind} | {text} |\n" in page


def test_what_is_refused_is_refused_by_name(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    check_fields(args)
    refused = [f.name for f in dataclasses.fields(args) if f.name in REFUSED]
    assert len(refused) > 9
    for name in refused:
        was = getattr(args, name)
        setattr(args, name, "something")
        with pytest.raises(CompositionError, match=rf"TrainingArguments\.{name}='something'"):
            check_fields(args)
        setattr(args, name, was)


def test_a_field_of_tomorrow_is_refused_and_a_users_own_is_not(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Own(TrainingArguments):
        temperature: float = 1.0

    args = Own(output_dir=str(tmp_path), use_cpu=True, temperature=2.0)
    check_fields(args)
    Own.__module__ = "transformers.tomorrow"
    with pytest.raises(CompositionError, match=r"temperature=2\.0"):
        check_fields(args)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"accelerator_config": {"even_batches": False}}, "even_batches"),
        ({"optim": "adagrad"}, "optim='adagrad'"),
        ({"optim": "sgd", "optim_args": "dampening=0.5"}, "dampening"),
    ],
)
def test_settings_within_a_field_are_refused(
    tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    with pytest.raises(CompositionError, match=found):
        trainer(tmp_path, args=changes).train()


class OwnOptimizer(zf.hf.Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        return torch.optim.SGD(self.model.parameters())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, labels: Any = None) -> Any:
        return self.norm(labels)


def test_what_would_go_past_the_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompositionError, match="create_optimizer"):
        trainer(tmp_path, OwnOptimizer)
    model = model_of("llama")
    given = torch.optim.SGD(model.parameters(), lr=1.0), None
    with pytest.raises(CompositionError, match="optimizers"):
        trainer(tmp_path, model=model, optimizers=given)
    with pytest.raises(CompositionError, match="norm of the model keeps running statistics"):
        trainer(tmp_path, model=Normed())
    with pytest.raises(CompositionError, match="gradient_accumulation_steps"):
        trainer(tmp_path, transforms=lambda step: zf.accumulate(step, 2)).train()
    with pytest.raises(CompositionError, match="hyperparameter_search"):
        trainer(tmp_path).hyperparameter_search()


class Writes(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        with torch.no_grad():
            model.lm_head.weight.mul_(0.9)


class Saves(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
        model.save_pretrained(args.output_dir)


@pytest.mark.parametrize("callback", [Writes, Saves])
def test_a_callback_that_touches_weights_is_told(tmp_path: Path, callback: type) -> None:
    made = trainer(tmp_path, callbacks=[callback()])
    with pytest.raises(PlacementError, match=r"during training.*trainer\.save_model"):
        made.train()
    assert not any(p.is_meta for p in made.model.parameters())


class Freezes(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        next(model.parameters()).requires_grad = False


def test_a_callback_that_freezes_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"requires_grad .* Freeze parameters before train"):
        trainer(tmp_path, callbacks=[Freezes()]).train()


@pytest.mark.parametrize(
    ("optim", "options"),
    [
        ("sgd", "momentum=0.9,nesterov=True"),
        ("rmsprop", "alpha=0.9,momentum=0.8,eps=1e-3"),
        ("rmsprop", "alpha=0.9,momentum=0.8,eps=1e-3,centered=True"),
        ("adafactor", None),
    ],
)
def test_optimizers_are_those_of_torch(tmp_path: Path, optim: str, options: str | None) -> None:
    args: dict[str, Any] = {"optim": optim, "weight_decay": 0.1, "learning_rate": 1e-2}
    args["max_steps"] = 4  # at four rates
    if (
        options and int(transformers.__version__.split(".")[0]) > 4
    ):  # which gave these two no options
        args["optim_args"] = options
    weights = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        made = trainer(tmp_path, kind, model_of("llama", torch.float64), args=args)
        made.train()
        weights.append(made.model.state_dict())
    for name, want in weights[0].items():
        assert torch.allclose(weights[1][name], want, rtol=1e-9, atol=1e-12), name


def test_adafactor_of_more_dimensions_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), optim="adafactor", use_cpu=True)
    tx = optimizer_for(args, bool)(1e-2)
    tx.init({"table": torch.zeros(3, 4)})
    with pytest.raises(CompositionError, match=r"conv has shape \(2, 3, 4\)"):
        tx.init({"conv": torch.zeros(2, 3, 4)})


def test_weights_go_and_come_back(tmp_path: Path) -> None:
    seen = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        model = model_of("llama")
        made = trainer(tmp_path, kind, model, args={"learning_rate": 1e-2})
        seen.append([made.evaluate()["eval_loss"]])
        made.train()
        seen[-1].append(made.evaluate()["eval_loss"])
    (before, after), ours = seen
    assert ours == pytest.approx([before, after]) and before != after
    assert made.model is model
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied as before
    made.save_model(str(tmp_path / "saved"))
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert trainer(tmp_path, model=read).evaluate()["eval_loss"] == pytest.approx(after)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    zeroed = trainer(tmp_path, transformers.Trainer, model).evaluate()["eval_loss"]
    assert made.evaluate()["eval_loss"] == pytest.approx(zeroed) and zeroed != pytest.approx(after)


class Scaled(zf.hf.Trainer):
    """A loss that is tiny, or huge."""

    by = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.by


def test_fp16_scales_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "by", 1e-6)  # gradients that float16 rounds to zeros
    norms = []
    for fp16 in (False, True):
        made = trainer(tmp_path, Scaled, args={"fp16": fp16, "logging_steps": 1})
        made.train()
        norms.append([x["grad_norm"] for x in made.state.log_history if "grad_norm" in x])
    assert norms[1] == pytest.approx(norms[0], rel=1e-2) and len(norms[0]) == 2


def test_an_overflow_leaves_the_update_and_the_schedule_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "by", 1e4)
    model = model_of("llama")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    args = {"fp16": True, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    made = trainer(tmp_path, Scaled, model, args=args)
    made.train()
    assert made.lr_scheduler.last_epoch == 0
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    for read in (model.state_dict(), saved.state_dict()):  # in float32, as they were
        assert all(torch.equal(read[name], x) for name, x in before.items())


class Rates(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.0


def test_a_callback_may_set_the_learning_rate(tmp_path: Path) -> None:
    model = model_of("llama")
    before = model.lm_head.weight.clone()
    trainer(tmp_path, model=model, callbacks=[Rates()]).train()
    assert torch.equal(model.lm_head.weight, before)


class SetsDecay(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.5


def test_a_callback_may_set_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(CompositionError, match="weight_decay was set in optimizer"):
        trainer(tmp_path, callbacks=[SetsDecay()]).train()


class Changes(TrainerCallback):  # type: ignore[misc]
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.change(model)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda m: setattr(m.layers[0].self_attn, "attention_dropout", 0.5),
            r"layers\.0\.self_attn\.attention_dropout of .* from 0\.0 to 0\.5 during train",
        ),
        (
            lambda m: m.layers[1].mlp.register_forward_hook(lambda *_: None),
            r"layers\.1\.mlp\._forward_hooks of .* changed during train",
        ),
        (
            lambda m: setattr(m.rotary_emb, "inv_freq", torch.ones(4)),
            r"rotary_emb\.inv_freq of .* changed",
        ),
    ],
)
def test_a_callback_that_changes_the_module_is_told(
    tmp_path: Path, change: Any, found: str
) -> None:
    made = trainer(tmp_path, callbacks=[Changes(lambda model: change(model.model))])
    with pytest.raises(PlacementError, match=found):
        made.train()


class Ramped(nn.Module):
    """A loss with a weight that a callback writes to, and a flag that its mode sets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.sharp = nn.Embedding(32, 4), nn.Linear(4, 32), False
        self.register_buffer("weight", torch.ones(()))

    def train(self, mode: bool = True) -> Any:
        self.sharp = not mode
        return super().train(mode)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        scores = self.head(self.table(input_ids)) * (2 if self.sharp else 1)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss * self.weight}


def test_buffers_may_be_changed_in_place_and_modes_set_attributes(tmp_path: Path) -> None:
    found = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        halve = Changes(lambda m: m.weight.mul_(0.5))
        args = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        made = trainer(tmp_path, kind, Ramped(), args=args, callbacks=[halve])
        made.train()
        history = made.state.log_history
        found.append([x[k] for x in history for k in ("loss", "eval_loss") if k in x])
    assert found[1] == pytest.approx(found[0]) and len(found[0]) == 4


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows of which nobody knows how many there are."""

    def __init__(self, family: str, n: int) -> None:
        self.rows = Tokens(family, n, 1)

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


@pytest.mark.parametrize("family", ["llama", "bert"])  # whose losses are parts of sums, or means
def test_a_stream_that_ends_in_an_update_is_added_to_the_next(tmp_path: Path, family: str) -> None:
    found = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        args = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
        args |= {"logging_steps": 1, "max_steps": 3, "learning_rate": 1e-2}
        made = kind(
            model=model_of(family, torch.float64),
            args=arguments(tmp_path, **args),
            train_dataset=Stream(family, 9),
        )
        made.pop_callback(transformers.PrinterCallback)
        made.train()
        history = made.state.log_history
        found.append([x[k] for x in history for k in ("loss", "grad_norm") if k in x])
    assert found[1] == pytest.approx(found[0], rel=1e-6) and len(found[0]) == 6


def test_transforms_and_optimizers_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(CompositionError, match="`transforms` gave NoneType"):
        trainer(tmp_path, transforms=lambda step: None).train()
    for wrong in (zf.optim.adamw(1e-3), lambda lr: None):
        with pytest.raises(CompositionError, match="expected a function of the learning rate"):
            trainer(tmp_path, optimizer=wrong)
    for transforms in (functools.partial(zf.shard, stage=3), zf.shard(stage=3), zf.remat):
        trainer(tmp_path, args={"max_steps": 1}, transforms=transforms).train()


@pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning")  # transformers 4
def test_training_stops_early_with_the_best_weights(tmp_path: Path) -> None:
    args = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    args |= {"load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 0.03}
    found = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        folder = tmp_path / kind.__module__
        stop = transformers.EarlyStoppingCallback(early_stopping_patience=2)
        made = trainer(folder, kind, args={**args, "max_steps": 12}, callbacks=[stop])
        made.train()
        left = sorted(x.name for x in folder.glob("checkpoint-*"))
        found.append((made.model.state_dict(), made.state.global_step, left))
    (weights, *plain), (ours, *same) = found
    assert same == plain and plain[0] < 12 and len(left) == 1
    for name, want in weights.items():
        assert torch.allclose(ours[name], want, atol=1e-6), name
    best = transformers.LlamaForCausalLM.from_pretrained(made.state.best_model_checkpoint)
    assert all(torch.equal(ours[name], x) for name, x in best.state_dict().items())


def test_a_second_run_goes_on_with_its_moments(tmp_path: Path) -> None:
    weights = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        made = trainer(tmp_path, kind, args={"learning_rate": 1e-2})
        made.train()
        made.train()
        weights.append(made.model.state_dict())
    for name, want in weights[0].items():
        assert torch.allclose(weights[1][name], want, atol=1e-6), name


def test_a_checkpoint_of_torch_is_not_resumed(tmp_path: Path) -> None:
    args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path, transformers.Trainer, args=args).train()
    with pytest.raises(CheckpointError, match="from_pretrained"):
        trainer(tmp_path, args=args).train(resume_from_checkpoint=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_trained_and_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
    found = []
    for kind in (transformers.Trainer, zf.hf.Trainer):
        torch.manual_seed(1)
        model = peft.get_peft_model(model_of("llama"), config)
        folder = tmp_path / kind.__module__
        args = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
        made = trainer(folder, kind, model, args=args)
        made.train()
        found.append(
            (model.state_dict(), sorted(x.name for x in (folder / "checkpoint-1").iterdir()))
        )
    assert "adapter_model.safetensors" in found[1][1] and "model.safetensors" not in found[1][1]
    for name, want in found[0][0].items():
        assert torch.allclose(found[1][0][name], want, atol=1e-6), name


def test_noise_of_embeddings_is_drawn(tmp_path: Path) -> None:
    losses = []
    for alpha in (None, 5.0):
        made = trainer(tmp_path, args={"neftune_noise_alpha": alpha})
        losses.append(made.train().training_loss)
    assert losses[0] != losses[1]
    assert not made.model.get_input_embeddings()._forward_hooks


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # dynamo's own look
def test_layers_are_compiled_where_torch_compile_says_so(tmp_path: Path) -> None:
    eager = trainer(tmp_path / "eager")
    losses = [eager.train().training_loss]
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    also = trainer(tmp_path / "compiled", args=compiled)
    torch._dynamo.utils.counters.clear()
    losses.append(also.train().training_loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_without_the_extra_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "zfunc.hf")
    with pytest.raises(ImportError, match=r"pip install 'zfunc-torch\[hf\]'"):
        importlib.import_module("zfunc.hf")
