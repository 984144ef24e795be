"""What can go wrong, by name.

Every error derives from :class:`ZfuncError` and from the built-in that it
specialises, so ``except ValueError`` keeps working. A message says where (the
leaf path or the unit), what was found, what was expected, and the fix.
"""

from __future__ import annotations

__all__ = [
    "BackwardError",
    "CheckpointError",
    "CompositionError",
    "DesyncError",
    "DeviceError",
    "DonatedStateError",
    "NonFiniteError",
    "PlacementError",
    "ScheduleError",
    "ZfuncError",
]


class ZfuncError(Exception):
    """Base of every error that zfunc raises on purpose."""


class PlacementError(ZfuncError, ValueError):
    """A state is not in the representation that a step expects."""


class CompositionError(ZfuncError, ValueError):
    """These transforms, or this transform and this step, mean nothing together."""


class ScheduleError(CompositionError):
    """A pipeline schedule cannot run: an action is missing, there twice, or waits for ever."""


class DonatedStateError(ZfuncError, RuntimeError):
    """A state was used again after its memory had been given to its successor."""


class DesyncError(ZfuncError, RuntimeError):
    """Ranks disagree on which collective comes next, or one of them is gone."""


class DeviceError(ZfuncError, RuntimeError):
    """A rank lacks the GPU, or the process group the backend, that its work needs."""


class CheckpointError(ZfuncError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class NonFiniteError(ZfuncError, ArithmeticError):
    """A NaN or an infinity where a finite number was promised."""


class BackwardError(ZfuncError, RuntimeError):
    """A backward in parts was asked for in the wrong order, or with what does not fit."""
