"""``compress_grads``: its methods by name, and their arguments checked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from zfunc.engine.step import transform_of
from zfunc.transforms.compression.gathering import GATHERS
from zfunc.transforms.compression.low_rank import PowerSGD
from zfunc.transforms.compression.onebit import OneBit
from zfunc.transforms.compression.quantized import Int4, Int8
from zfunc.transforms.compression.transform import CompressGrads
from zfunc.transforms.compression.zero_one import ZeroOne, ZeroOneAdam

__all__ = ["compress_grads"]

METHODS: dict[str, Any] = {
    "onebit": OneBit,
    "zero_one": ZeroOne,
    "int8": Int8,
    "int4": Int4,
    "powersgd": PowerSGD,
}


@transform_of
def compress_grads(
    method: str = "onebit",
    freeze_step: int | str = "auto",
    gather: str | None = None,
    **method_options: Any,
) -> CompressGrads:
    """Send one bit (or 4, or 8) an element in place of gradients, and keep what is left out.

    Call it as ``compress_grads(step, ...)`` or as the decorator ``@compress_grads(...)``,
    beside ``shard``; without it, or on one rank, there is nothing to send.

    Args:
        method: ``"onebit"``, ``"zero_one"`` (see :mod:`zfunc.transforms.compression.zero_one`),
            ``"int8"``, ``"int4"`` or ``"powersgd"``.
        freeze_step: how many steps are plain before compression begins and, with one bit,
            second moments freeze. ``"auto"`` waits until these have settled.
        gather: at ZeRO stages 1 and 2, what parameters are gathered as once compression has begun:
            ``None``, as they are; or updates of them as ``"bf16"``, ``"int8"``, ``"int4"`` or
            ``"onebit"``, what these lack being kept (4 bytes a parameter, cut over the ranks).
        method_options: ``group``, elements that share a scale: 2048 for ``"onebit"`` (``None``
            for all that travel to one rank together), 256 for ``"int8"``, 128 for ``"int4"``.
            Those of ``"onebit"`` begin anew with each leaf (small neighbours share one). It also
            has ``scaling="mean"``, ``"rms"`` or ``"auto"`` (rms for momentum that travels as it is,
            else the mean), and ``"zero_one"`` beside these
            ``var_update_scaler=16``, ``local_step_scaler=32768`` and ``local_step_clipper=16``.
            ``"powersgd"`` has ``rank=4``.

    Returns:
        A :class:`~zfunc.Step`. A step in which some rank meets a gradient that is not finite
        changes nothing but the step count, once compression has begun; ``aux`` counts them.
        With one bit, norms of gradients are the root mean square of the ranks' own, an upper
        bound on the norm of the mean.

    Raises:
        ValueError: an unknown method or option, or a ``freeze_step`` that is neither
            ``"auto"`` nor a number of steps.
        CompositionError: the step is compressed already, or ``gather`` has nothing to gather; with
            ``"zero_one"`` a stage that cuts, a transform that changes what parameters enter as, or
            (from ``place`` and the step) an optimizer other than ``adam`` and ``adamw``.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: there are {', '.join(map(repr, METHODS))}.")
    fits = freeze_step == "auto" or (type(freeze_step) is int and freeze_step >= 0)
    if not fits:
        raise ValueError(
            f"freeze_step={freeze_step!r}: expected 'auto', or how many steps come before "
            "compression (15 to 20 % of all is usual)."
        )
    if gather is not None and gather not in GATHERS:
        raise ValueError(f"gather={gather!r}: None, or {', '.join(map(repr, GATHERS))}.")
    known = {f.name for f in fields(METHODS[method])}
    if unknown := method_options.keys() - known:
        raise ValueError(
            f"{method!r} has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(known))}."
        )
    codec = METHODS[method](**method_options)
    if method == "zero_one" and freeze_step == 0:
        raise ValueError("freeze_step=0: 0/1 Adam freezes second moments, which must learn first.")
    kind = ZeroOneAdam if method == "zero_one" else CompressGrads
    return kind(method, freeze_step, codec, gather)
