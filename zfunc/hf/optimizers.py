"""``TrainingArguments.optim`` as one of our optimizers, with torch's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfunc import optim
from zfunc.errors import CompositionError
from zfunc.optim import EmptyState, GradientTransformation
from zfunc.optim.places import places

__all__ = ["optimizer_for"]

ADAMW = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit")
LION = ("lion_32bit", "paged_lion_32bit")
OPTIONS = {
    "sgd": {"momentum", "nesterov"},
    "rmsprop": {"momentum", "alpha", "eps", "centered"},
}


def optimizer_for(
    args: Any, decayed: Callable[[str], bool]
) -> Callable[[float], GradientTransformation]:
    """``lr -> optimizer`` for ``args.optim``.

    Args:
        args: ``TrainingArguments``.
        decayed: whether weight decay acts on the leaf of a dotted path.

    Raises:
        CompositionError: we have no such optimizer, or not with those ``optim_args``.
    """
    name, options = str(getattr(args.optim, "value", args.optim)), _options(args.optim_args)
    if unknown := options.keys() - OPTIONS.get(name, set()):
        raise CompositionError(
            f"TrainingArguments.optim_args: {', '.join(sorted(unknown))} of optim={name!r} cannot "
            "be set here. Give the optimizer: Trainer(..., optimizer=lambda lr: zf.optim...(lr))."
        )
    b1, b2, decay = args.adam_beta1, args.adam_beta2, args.weight_decay
    if name in ADAMW:
        return lambda lr: optim.adamw(lr, b1, b2, args.adam_epsilon, decay, mask=decayed)
    if name in LION:
        return lambda lr: optim.lion(lr, b1, b2, decay, mask=decayed)
    if name == "adafactor":
        return lambda lr: _adafactor(lr, decay, decayed)
    if name == "sgd":
        momentum, nesterov = float(options.get("momentum", 0)), _true(options.get("nesterov"))
        return lambda lr: _coupled(optim.sgd(lr, momentum, nesterov), decay, decayed)
    if name == "rmsprop":
        by = optim.scale_by_stddev if _true(options.get("centered")) else optim.scale_by_rms
        alpha, eps = float(options.get("alpha", 0.99)), float(options.get("eps", 1e-8))
        scaled = by(alpha, eps, eps_in_sqrt=False)
        if momentum := float(options.get("momentum", 0)):  # torch's is before the rate
            scaled = optim.chain(scaled, optim.trace(momentum))
        return lambda lr: _coupled(
            optim.chain(scaled, optim.scale_by_learning_rate(lr)), decay, decayed
        )
    raise CompositionError(
        f"TrainingArguments.optim={name!r} has no counterpart in zfunc. Choose one of "
        f"{', '.join([*ADAMW, *LION, 'adafactor', *OPTIONS])}, or give any of zf.optim: "
        "Trainer(..., optimizer=lambda lr: zf.optim...(lr))."
    )


def _adafactor(lr: float, decay: float, decayed: Callable[[str], bool]) -> GradientTransformation:
    """Adafactor as Trainer asks transformers for it: no scale of parameters, its own rate.

    It factors all matrices, however small, and decays by the rate times the parameters.
    """
    return optim.chain(
        GradientTransformation(_matrices, lambda g, s, p: (g, s), checked=True, unfit=None),
        optim.scale_by_factored_rms(min_dim_size_to_factor=1),
        optim.clip_by_block_rms(1.0),
        optim.add_decayed_weights(decay, mask=decayed) if decay else optim.identity(),
        optim.scale_by_learning_rate(lr),
    )


def _matrices(params: Any) -> EmptyState:
    for path, place in places(params).items():
        if len(place.shape) > 2:
            raise CompositionError(
                f"TrainingArguments.optim='adafactor': {path} has shape {place.shape}, of which "
                "transformers' Adafactor factors the last two dimensions, and zfunc's the two "
                "longest. Take zfunc's: Trainer(..., optimizer=lambda lr: zf.optim.adafactor(lr, "
                "multiply_by_parameter_scale=False))."
            )
    return EmptyState()


def _coupled(
    tx: GradientTransformation, decay: float, decayed: Callable[[str], bool]
) -> GradientTransformation:
    """Weight decay as a part of the gradient, where torch's optimizer has it."""
    return optim.chain(optim.add_decayed_weights(decay, mask=decayed), tx) if decay else tx


def _options(text: Any) -> dict[str, str]:
    """``"a=1,b=2"`` as a dict."""
    pairs = str(text).replace(" ", "").split(",") if text else []
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def _true(text: str | None) -> bool:
    return (text or "").lower() in ("true", "1", "yes")
