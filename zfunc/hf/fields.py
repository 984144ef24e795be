"""What becomes of each field of ``TrainingArguments``: honoured, meaningless, or refused by name.

The table has the fields of every release of transformers that the extra ``hf`` allows. A field that
it does not have is refused where its value is not the default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from zfunc.errors import CompositionError

__all__ = ["HONOURED", "MEANINGLESS", "REFUSED", "check_fields"]

# Trainer's own code does these as ever, but for what is said behind them.
HONOURED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("output_dir", "overwrite_output_dir", "num_train_epochs", "max_steps", "seed"),
            *("per_device_train_batch_size", "per_device_eval_batch_size", "data_seed"),
            *("per_gpu_train_batch_size", "per_gpu_eval_batch_size"),
            *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
            *("warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
            *("average_tokens_across_devices", "label_smoothing_factor", "tf32", "use_cache"),
            *("neftune_noise_alpha", "logging_dir", "logging_strategy", "logging_steps"),
            *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
            *("include_num_input_tokens_seen", "include_tokens_per_second", "log_level"),
            *("log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
            *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
            *("eval_strategy", "eval_steps", "eval_delay", "prediction_loss_only"),
            *("eval_on_start", "eval_do_concat_batches", "eval_use_gather_object"),
            *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"),
            *("include_inputs_for_metrics", "save_strategy", "save_steps", "save_total_limit"),
            *("metric_for_best_model", "greater_is_better", "ignore_data_skip"),
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
            *("hub_always_push", "hub_revision", "push_to_hub_model_id"),
            *("push_to_hub_organization", "push_to_hub_token", "full_determinism"),
            *("restore_callback_states_from_checkpoint", "use_cpu", "no_cuda"),
            *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
            *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *("dataloader_multiprocessing_context", "dataloader_in_order"),
            *("remove_unused_columns", "label_names", "train_sampling_strategy"),
            *("group_by_length", "length_column_name", "ddp_backend", "ddp_timeout"),
            *("skip_memory_metrics", "sortish_sampler", "generation_max_length"),
            *("generation_num_beams", "generation_config"),
        ),
        "as in Trainer",
    ),
    "optim": "adamw_torch, adamw_torch_fused, adafactor, sgd, rmsprop, lion_32bit and the paged "
    "ones in 32 bits are zf.optim's; others are refused, and `optimizer=` takes any",
    "optim_args": "of sgd and rmsprop; others are refused",
    "gradient_accumulation_steps": "the microbatches of an update are one step",
    "max_grad_norm": "the norm is that of all leaves on all ranks",
    "bf16": "zf.precision, unless `transforms` has it",
    "fp16": "zf.precision in float16, with the loss scale of torch's GradScaler, unless "
    "`transforms` has it",
    "gradient_checkpointing": "zf.remat, unless `transforms` has it",
    "gradient_checkpointing_kwargs": "`use_reentrant` means nothing; others are refused",
    "activation_checkpointing": "zf.remat, unless `transforms` has it",
    "activation_checkpointing_kwargs": "`use_reentrant` means nothing; others are refused",
    "torch_compile": "zf.functionalize(model, compile=...)",
    "torch_compile_backend": "part of `compile`",
    "torch_compile_mode": "part of `compile`",
    "save_only_model": "checkpoints are Hugging Face folders without the step's state",
    "load_best_model_at_end": "read into the module and placed again",
    "accelerator_config": "`even_batches=False` and `sync_each_batch` are refused",
    "predict_with_generate": "the whole model is on each rank while tokens are generated",
}

# They change nothing here, whatever they are, and nothing is lost.
MEANINGLESS: dict[str, str] = {
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "resume_from_checkpoint"), "the script's"
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph"),
        "nothing is wrapped in DistributedDataParallel",
    ),
    "ddp_broadcast_buffers": "models whose buffers change in training are refused",
    "local_rank": "the launcher says it",
    "_n_gpu": "a process has one GPU",
    "ray_scope": "of hyperparameter search, which is refused",
    "fp16_opt_level": "of apex, which nothing uses",
    "half_precision_backend": "bf16 and fp16 are zf.precision",
    "fp16_backend": "bf16 and fp16 are zf.precision",
    "liger_kernel_config": "of use_liger_kernel, which is refused",
    "fsdp_config": "of fsdp, which is refused",
    "fsdp_min_num_params": "of fsdp, which is refused",
    "fsdp_transformer_layer_cls_to_wrap": "of fsdp, which is refused",
    "tpu_metrics_debug": "of TPUs, which zfunc does not use",
    "tpu_num_cores": "of TPUs, which zfunc does not use",
}

# What to write instead.
REFUSED: dict[str, str] = {
    "deepspeed": "Write the stage instead: transforms=lambda step: zf.shard(step, stage=...), and "
    "zf.offload for what DeepSpeed offloads.",
    "fsdp": "Write transforms=lambda step: zf.shard(step, stage=3) instead.",
    "parallelism_config": "Write zf.shard(...) with a mesh in `transforms` instead.",
    "mp_parameters": "SageMaker's model parallelism is not zfunc's.",
    "auto_find_batch_size": "A step that ran out of memory may have spent its state. Set "
    "per_device_train_batch_size; step.describe(batch) foresees what one takes.",
    "bf16_full_eval": "bf16=True evaluates in bfloat16, too.",
    "fp16_full_eval": "fp16=True evaluates in float16, too.",
    "use_liger_kernel": "It replaces parts of the model with kernels that know nothing of shards.",
    "optim_target_modules": "Give the optimizer: Trainer(..., optimizer=lambda lr: ...).",
    "adafactor": "Set optim='adafactor'.",
    "torch_empty_cache_steps": "zfunc keeps its buffers from step to step: leave it out.",
    "enable_jit_checkpoint": "Its signal reaches one rank, and all ranks write a checkpoint. Stop "
    "by a callback that asks zf.preemption's `stop()` and sets control.should_save.",
    "save_on_each_node": "Each rank writes its part of one folder, on a file system that all see.",
    "save_safetensors": "Weights are written as safetensors.",
    "debug": "Hooks on the module would see no parameters. zf.optim.skip_nonfinite guards updates.",
    "past_index": "Memories are not kept from batch to batch.",
    "jit_mode_eval": "Evaluation runs the functionalized model.",
    "use_legacy_prediction_loop": "Evaluation runs in evaluation_loop.",
    "torchdynamo": "Set torch_compile.",
    "use_mps_device": "zfunc runs on CPUs and CUDA.",
}

CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


def check_fields(args: Any) -> None:
    """Raise if a training argument cannot be honoured.

    Raises:
        CompositionError: names the argument and says what to write instead.
    """
    for field in dataclasses.fields(args):
        value = getattr(args, field.name, None)
        if field.name in HONOURED or field.name in MEANINGLESS or _is_off(field, value):
            continue
        if (known := REFUSED.get(field.name)) is not None:
            raise _refusal(field.name, value, known)
        if _is_of_transformers(args, field.name):
            raise _refusal(field.name, value, "This release of zfunc does not know it.")
    for name in CHECKPOINTING:
        given = getattr(args, name, None) or {}
        if other := sorted(given.keys() - {"use_reentrant"}):
            how = "Give zf.remat its own arguments, in `transforms`."
            raise _refusal(name, {key: given[key] for key in other}, how)
    config = args.accelerator_config
    if not config.even_batches:
        how = "Every rank takes part in every evaluation: ranks need as many batches."
        raise _refusal("accelerator_config", "even_batches=False", how)
    if (config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        how = "The microbatches of an update are one step: leave it out."
        raise _refusal("accelerator_config", "sync_each_batch=True", how)
    if args.n_gpu > 1:
        raise CompositionError(
            f"this process sees {args.n_gpu} GPUs and has no others beside it: Trainer would use "
            "nn.DataParallel. Start one process a GPU: torchrun --nproc-per-node ..."
        )


def _is_off(field: Any, value: Any) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return field.name != "save_safetensors"
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(value == default)


def _is_of_transformers(args: Any, name: str) -> bool:
    """Whether a field is transformers' own, not one that a subclass of the user's has."""
    return any(
        name in vars(kind).get("__annotations__", {})
        for kind in type(args).__mro__
        if kind.__module__.startswith("transformers.")
    )


def _refusal(name: str, value: Any, how: str) -> CompositionError:
    return CompositionError(f"TrainingArguments.{name}={value!r} is refused by zf.hf. {how}")
