"""Trainer's methods that change where the step is one of zfunc's.

Trainer keeps its loop, data, schedule, logs, callbacks and metrics. The microbatches of an update
are collected and become one call of the step. Parameters and moments lie as the step's transforms
place them; the user's module is empty meanwhile, and is filled again when ``train()`` ends.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import PreTrainedModel

from zfunc import optim
from zfunc.engine.differentiation import evaluate, value_and_grad
from zfunc.engine.state import TrainState
from zfunc.engine.step import Step
from zfunc.errors import CheckpointError, CompositionError
from zfunc.files.checkpoint import restore, save
from zfunc.files.pretrained import export_safetensors
from zfunc.hf.fields import check_fields
from zfunc.hf.microbatches import Microbatches
from zfunc.hf.optimizers import optimizer_for
from zfunc.hf.records import Record
from zfunc.hf.rows import gathered_once, loader_of, sharers
from zfunc.hf.standins import Homes, Standin, buffers_on, empty, fill, holds_all, homes
from zfunc.modules.functional import Functional, functionalize
from zfunc.optim import GradientTransformation
from zfunc.ranks.launching import init
from zfunc.ranks.meshes import Mesh
from zfunc.ranks.world import world_size
from zfunc.transforms import donate, precision, remat, shard
from zfunc.transforms.mixed_precision.masters import Mastered
from zfunc.transforms.pipelining.transform import Pipeline
from zfunc.trees import tree
from zfunc.trees.reduction import linear_map

__all__ = ["Bridge"]

GRAD_SCALER = optim.DynamicScale(power=16, window=2000, hysteresis=1)  # torch's GradScaler
STATE = "zfunc"  # the folder of the step's state in a checkpoint
ELSEWHERE = (
    ("create_optimizer", "Trainer(..., optimizer=lambda lr: zf.optim...(lr))"),
    ("create_optimizer_and_scheduler", "Trainer(..., optimizer=lambda lr: zf.optim...(lr))"),
    ("get_optimizer_cls_and_kwargs", "Trainer(..., optimizer=lambda lr: zf.optim...(lr))"),
)
OTHERS = {"weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha"}
Base: Any = object  # a Trainer of transformers, in the classes that are made of this one


class Rates(torch.optim.Optimizer):
    """What Trainer's schedules set learning rates in; the step reads them."""

    def __init__(self, lr: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(0))], {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """Nothing: the step has made the update."""


class Bridge(Base):
    """The methods of a ``transformers.Trainer`` that go another way."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        transforms: Callable[..., Step] | None = None,
        optimizer: Callable[[float], GradientTransformation] | None = None,
        **kwargs: Any,
    ) -> None:
        self._transforms: Callable[..., Step] = transforms or _as_ddp
        self._make = optimizer
        self._placed: Any = None  # the step's state
        self._beheld: Any = None  # parameters for an evaluation outside of train()
        self._places: Homes = {}  # where parameters are while train() runs
        self._waiting: list[tuple[Any, Any, int]] = []  # with how many microbatches it was counted
        self._together = 1  # how many microbatches the update has
        self._record: Record | None = None  # of the module while train() runs
        self._norm: Any = None
        self._fresh = True
        super().__init__(*args, **kwargs)
        init()
        check_fields(self.args)
        self._check()

    def _check(self) -> None:
        given = self.optimizer, self.lr_scheduler, getattr(self, "optimizer_cls_and_kwargs", None)
        if any(x is not None for x in given):
            raise CompositionError(
                "Trainer got `optimizers` or `optimizer_cls_and_kwargs`: torch's optimizers update "
                "a module's own parameters, and zfunc places them elsewhere. Set "
                "TrainingArguments.optim and lr_scheduler_type, or give an optimizer of zfunc's: "
                "Trainer(..., optimizer=lambda lr: zf.optim.adamw(lr, weight_decay=0.1))."
            )
        if self._make is None:
            optimizer_for(self.args, bool)  # raises where there is none
        else:
            _check_optimizer(self._make, self.args.learning_rate)
        for name, instead in ELSEWHERE:
            if not getattr(type(self), name).__module__.startswith(("zfunc.", "transformers.")):
                raise CompositionError(
                    f"{type(self).__name__} overrides {name}, which makes torch's optimizer. "
                    f"Write {instead}; learning rates are those of Trainer's schedule."
                )
        for name, part in self.model.named_modules() if self.model is not None else ():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                raise CompositionError(
                    f"{name} of the model keeps running statistics, which Trainer would update in "
                    "the module. Write the step with zf.train_step, whose loss takes `buffers`."
                )

    # How the model and the step's state come and go

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Alone, as Trainer does. On several ranks the whole model stays where it is, and each
        rank's part goes to its device."""
        if self.args.world_size == 1:
            super()._move_model_to_device(model, device)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = None  # zf.precision scales losses
        self.accelerator.clip_grad_norm_ = lambda *_, **__: self._norm
        self.accelerator.prepare_data_loader = partial(
            self._loader, self.accelerator.prepare_data_loader
        )

    def create_optimizer(self, model: Any = None) -> Any:
        """What holds the learning rate. Source: transformers, ``Trainer.create_optimizer``."""
        if self.optimizer is None:
            self.optimizer, self._fresh = Rates(self.args.learning_rate), True
        return self.optimizer

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        if training:
            self._begin()
        return Standin(lambda: self.model, self._evaluated)

    def _begin(self) -> None:
        """Place the model's parameters, and those moments that an earlier ``train()`` left."""
        old, self._placed = self._placed, None
        self._prepare()
        self._placed = self._place(self._tx(self.args.learning_rate))
        if old is not None and not self._fresh:
            self._placed = self._placed.replace(opt_state=old.opt_state)
        self._fresh, self._waiting = False, []
        self._places, self._home = homes(self.model), next(self.model.parameters()).device
        empty(self._places)
        self._record = Record(self.model)

    def _prepare(self) -> None:
        """The step and the functionalized model, as the module is now."""
        again = _switch_off_checkpointing(self.model)
        decayed = set(self.get_decay_parameter_names(self.model))
        self._tx = self._make or optimizer_for(self.args, decayed.__contains__)
        with buffers_on(self.model, self.args.device):
            self._functional: Functional = functionalize(self.model, **_compiled(self.args))
        step = self._wrapped(self._functional)
        names = {transform.name for transform in step.transforms}
        if "accumulate" in names:
            raise CompositionError(
                "`transforms` has zf.accumulate; TrainingArguments.gradient_accumulation_steps "
                "says how many microbatches an update has."
            )
        step = step.wrap(Microbatches())
        if "precision" not in names and self.args.bf16:
            step = precision(step, torch.bfloat16)
        if "precision" not in names and self.args.fp16:
            step = precision(step, torch.float16, loss_scale=GRAD_SCALER)
        if "remat" not in names and (again or _asks_for_checkpointing(self.args)):
            step = remat(step)
        self._in_short = any(transform.name == "precision" for transform in step.transforms)
        pipes = [x for x in step.transforms if isinstance(x, Pipeline)]
        self._parts = pipes[0].microbatches if pipes else 1
        self._step = step if "donate" in names else donate(step)

    def _wrapped(self, model: Any = None) -> Step:
        step: Any = Step(self._update)
        if _takes_model(self._transforms):
            step = self._transforms(step, functionalize(self.model) if model is None else model)
        else:
            step = self._transforms(step)
        if not isinstance(step, Step):
            raise CompositionError(
                f"`transforms` gave {type(step).__name__}, expected the step in its transforms: "
                "transforms=lambda step: zf.shard(step, stage=3)."
            )
        return step

    def _place(self, tx: GradientTransformation) -> Any:
        return self._step.place(TrainState.create(self._functional.params, tx, self.args.seed))

    def _fill(self, device: torch.device | None = None) -> None:
        """The parameters are in the module again, all of them on every rank; a collective.

        By default where they were before: a device that trains a part may not hold the whole.
        """
        where = self._home if device is None else device
        fill(self._places, tree.flatten_names(tree.full(self._weights)), where)

    @property
    def _weights(self) -> Any:
        """The parameters in their own precision, of which ``precision`` makes copies."""
        state = self._placed
        mastered = isinstance(state.opt_state, Mastered)
        return state.opt_state.masters["params"] if mastered else state.params

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A block in which the module has its parameters."""
        if holds_all(self.model):
            yield
            return
        self._unchanged()
        self._fill(self.args.device)
        try:
            with buffers_on(self.model, self.args.device):
                yield
        finally:
            empty(self._places)
            self._record = Record(self.model)  # generation may leave something in it

    def _unchanged(self) -> None:
        if self._places and self._record is not None:
            self._record.check(self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``transformers.Trainer.train``; at its end the model has the trained weights."""
        ended = False
        try:
            out = super().train(*args, **kwargs)
            ended = True
        finally:  # the others may be gone
            if (ended or world_size() == 1) and self._placed is not None:
                self._waiting = []
                self.model_wrapped = self.model
                if not holds_all(self.model):
                    self._fill()
                self._places = {}
        return out

    # Ranks that share their rows

    @functools.cached_property
    def _mesh(self) -> Mesh | None:
        """The mesh of the step, if there are ranks on it that share the rows of a batch.

        Raises:
            CompositionError: something that counts processes would count them twice.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said again when the model is functionalized for good
            mesh = self._wrapped().mesh
        if mesh is None or sharers(mesh := mesh.closed(world_size())) == 1:
            return None
        for name in ("eval_use_gather_object", "include_num_input_tokens_seen"):
            if getattr(self.args, name, False) not in (False, "no"):
                raise CompositionError(
                    f"TrainingArguments.{name} is refused with zf.split and zf.pipeline: ranks "
                    "that share rows would count twice. Leave it out."
                )
        return mesh

    def _loader(self, prepare: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mesh is None:
            return prepare(loader, *args, **kwargs)
        return loader_of(self.accelerator, self._mesh, loader)

    def get_tp_size(self) -> int:
        """How many ranks get the same rows."""
        return sharers(self._mesh)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Counted on all ranks, and divided by how many share rows."""
        once = self.accelerator.__dict__.pop("gather", None)
        try:
            return super()._get_num_items_in_batch(batch_samples, device)
        finally:
            if once is not None:
                self.accelerator.gather = once

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's own, where ranks share the work on their rows."""
        return int(super().floating_point_ops(inputs)) // self.get_tp_size()

    # The step

    def _update(self, state: Any, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """One update from all its microbatches; the metrics have its loss, and the gradients' norm.

        Source: transformers, ``Trainer._inner_training_loop``.
        """
        loss, grads = value_and_grad(self._loss)(state.params, batch["microbatches"])
        norm, limit = tree.global_norm(grads), self.args.max_grad_norm
        if limit:  # as torch.nn.utils.clip_grad_norm_ does
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            grads = tree.map(linear_map(lambda g: g * factor), grads)
        tx = self._tx(batch["lr"])
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return state, {"loss": loss, "norm": norm}

    def _loss(self, params: Any, inputs: Any, items: Any, counted_with: int) -> Tensor:
        """What Trainer differentiates: ``compute_loss``, the user's own if there is one.

        ``Microbatches`` and ``zf.pipeline`` take means. A loss that is a part of a sum, because it
        is divided by the items of the whole update, is multiplied by the number of its parts. Any
        other is divided by how many microbatches came with it: where data without a length ends
        in the middle of an update, what is left is added to the next one.
        """

        def call(_: bool, args: Any, kwargs: Any) -> Any:
            self._unchanged()
            return self._in_long(self._functional.apply(params, *args, train=True, **kwargs))

        model = Standin(lambda: self.model, call)
        loss: Tensor = self.compute_loss(model, copy.copy(inputs), num_items_in_batch=items)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and items is not None
            scaled = counted or self.compute_loss_func is not None
        factor = self._together * self._parts if scaled else self._together / counted_with
        return loss if factor == 1 else loss * factor

    def _in_long(self, out: Any) -> Any:
        """16-bit outputs as float32, as accelerate returns them from autocast."""
        return convert_to_fp32(out) if self._in_short else out

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Keep a microbatch; with the last of an update make it.

        Returns:
            0-d tensor: the update's loss, a mean over the ranks, or zero where more are to come.
        """
        model.train()
        together = self.current_gradient_accumulation_steps
        self._waiting.append((self._prepare_inputs(inputs), num_items_in_batch, together))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batch = {"lr": self._rate(), "microbatches": self._waiting}
        self._together, self._waiting = len(self._waiting), []
        self._placed, metrics = self._step(self._placed, batch)
        self._norm, loss = metrics["norm"], metrics["loss"]
        for optimizer in self.accelerator._optimizers:  # then Trainer's schedule waits, too
            optimizer._is_overflow = "overflow_leaf" in metrics
        return loss

    def _rate(self) -> float:
        """The schedule's learning rate, or a callback's.

        Raises:
            CompositionError: a callback has set something else.
        """
        group = self.optimizer.param_groups[0]
        if others := sorted(group.keys() & OTHERS):
            raise CompositionError(
                f"{others[0]} was set in optimizer.param_groups, of which only lr counts. Give the "
                "optimizer, with a schedule: Trainer(..., optimizer=lambda lr: zf.optim...(lr))."
            )
        return group["lr"]

    # Evaluation

    def _evaluated(self, training: bool, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise CompositionError(
                "the model was called for a gradient outside of compute_loss. zf.hf.Trainer "
                "differentiates compute_loss: override that, not training_step's backward."
            )
        self._unchanged()
        params = self._placed.params if self._beheld is None else self._beheld
        out = evaluate(partial(self._functional.apply, train=training))(params, *args, **kwargs)
        return self._in_long(out)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, on the shards; outside of ``train()`` on those of the module as it is."""
        if not self._places:
            self._prepare()
            self._beheld = self._place(optim.identity()).params
        try:
            with gathered_once(self.accelerator, self._mesh):
                return super().evaluation_loop(*args, **kwargs)
        finally:
            self._beheld = None

    # Files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face folder; a collective.

        During ``train()`` every rank writes its part of the weights. Models with adapters, with
        buffers that are saved, or whose files have other names are gathered on all ranks first.
        """
        folder = self.args.output_dir if output_dir is None else output_dir
        if holds_all(self.model) or not self._is_written_by_parts():
            with self._whole():
                super().save_model(folder, _internal_call=True)
        else:
            super()._save(folder, state_dict={})  # all but the weights
            export_safetensors(folder, self._weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _is_written_by_parts(self) -> bool:
        known = {id(p) for p in self.model.parameters()}
        with torch._C.DisableTorchFunctionSubclass():
            saved = self.model.state_dict(keep_vars=True)
        return (
            isinstance(self.model, PreTrainedModel)
            and not _is_renamed(self.model)
            and all(id(p) in known for p in saved.values())
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / STATE, self._placed)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / STATE).is_dir():  # else with the step's state
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / STATE).is_dir():
            self._placed = restore(folder / STATE, like=self._placed)
        elif (folder / "optimizer.pt").is_file():
            raise CheckpointError(
                f"{folder} has the state of torch's optimizer, and no folder {STATE!r}: another "
                "Trainer wrote it. Start from its weights: Model.from_pretrained(folder), without "
                "resume_from_checkpoint."
            )
        if (folder / "scheduler.pt").is_file():
            self.lr_scheduler.load_state_dict(
                torch.load(folder / "scheduler.pt", weights_only=True)
            )
            rates = self.lr_scheduler.get_last_lr()  # torch's optimizers have them in their state
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _load_best_model(self) -> None:
        with_moments = self._placed.opt_state
        self._fill()
        super()._load_best_model()
        self._prepare()
        self._placed = self._place(self._tx(self.args.learning_rate)).replace(
            opt_state=with_moments
        )

    # What makes no sense here

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a trial ends where it likes, and takes the other ranks' collectives with it.

        Raises:
            CompositionError: always.
        """
        raise CompositionError(
            "hyperparameter_search is refused by zf.hf: start a process group for each trial, "
            "with a Trainer of its own."
        )


def _check_optimizer(make: Any, lr: float) -> None:
    made = make(lr) if callable(make) else None
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise CompositionError(
            f"`optimizer` is {type(make).__name__}, expected a function of the learning rate that "
            "gives a GradientTransformation: Trainer(..., optimizer=lambda lr: zf.optim.adamw(lr))."
        )


def _takes_model(transforms: Callable[..., Any]) -> bool:
    """Whether a function has a second argument, which no default makes another thing."""
    more = [*inspect.signature(transforms).parameters.values()][1:]
    by_place = [x for x in more if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return any(x.default is x.empty or x.name == "model" for x in by_place[:1])


def _as_ddp(step: Step) -> Step:
    return shard(step, stage=0)


def _compiled(args: Any) -> dict[str, Any]:
    """The keyword of ``functionalize`` for ``torch_compile``."""
    if not args.torch_compile:
        return {}
    chosen = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {"compile": {key: x for key, x in chosen.items() if x is not None} or True}


def _is_renamed(model: PreTrainedModel) -> bool:
    """Whether files of a model have other names than its parameters."""
    found = getattr(model, "_weight_conversions", None)
    if found is None and find_spec("transformers.conversion_mapping"):  # not before transformers 5
        mapping = import_module("transformers.conversion_mapping")
        found = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return bool(found)


def _asks_for_checkpointing(args: Any) -> bool:
    new = getattr(args, "activation_checkpointing", None)
    return bool(args.gradient_checkpointing if new is None else new)


def _switch_off_checkpointing(model: nn.Module) -> bool:
    """Whether the module would have recomputed its activations, which is ``remat``'s to do."""
    found = [x for x in model.modules() if getattr(x, "gradient_checkpointing", None) is True]
    for part in found:
        part.__dict__["gradient_checkpointing"] = False
    return bool(found)
