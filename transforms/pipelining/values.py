"""What a loss returns beside tensors: numbers travel, anything else is what the rehearsal found.

The rehearsal is remembered by shapes, and the numbers of a later batch are others. Each value has a
row of bytes as wide as all others, so that what is sent does not depend on it.
"""

from __future__ import annotations

import struct
from typing import Any

from zfunc.errors import CompositionError
from zfunc.rehearsal.values import is_number, is_same

__all__ = ["WIDTH", "read", "written"]

_FORMS: dict[type, str] = {bool: "?", int: "q", float: "d", complex: "dd"}
_KINDS = tuple(_FORMS)
WIDTH = 17  # bytes: what follows, and a number
# 0: as in the rehearsal, also where nobody has sent anything. From 1 on: a number of these kinds;
# from _TYPED on it has the type that it had then (an enum's, one of NumPy's).
_TYPED, _OTHER = 16, 255


def written(x: Any, then: Any) -> bytes:
    """The row of a value that the last stage has.

    Args:
        then: the value in the rehearsal.
    """
    value = x.item() if is_number(x) and not isinstance(x, _KINDS) else x
    for n, kind in enumerate(_KINDS):
        if isinstance(value, kind) and (type(x) is type(then) or type(x) is kind):
            code = n + 1 + _TYPED * (type(x) is type(then))
            try:
                packed = struct.pack(f"<{_FORMS[kind]}", *_parts(kind(value)))
            except struct.error:  # an integer of more than 64 bits
                break
            return bytes([code]) + packed.ljust(WIDTH - 1, b"\0")
    return bytes([0 if is_same(x, then) else _OTHER]).ljust(WIDTH, b"\0")


def _parts(number: Any) -> tuple[Any, ...]:
    return (number.real, number.imag) if type(number) is complex else (number,)


def read(row: bytes, then: Any, position: int) -> Any:
    """The value of a row.

    Args:
        position: among all results, for the message.

    Raises:
        CompositionError: it is another one than then, and no number.
    """
    if row[0] == _OTHER:
        raise CompositionError(
            f"result {position} of the last stage of a pipeline was {then!r} in the rehearsal of "
            "this batch's shapes, and is something else for this batch: only tensors and numbers "
            "go to the other stages. Let the loss return a tensor."
        )
    if row[0] == 0:
        return then
    typed, n = divmod(row[0] - 1, _TYPED)
    found = struct.unpack_from(f"<{_FORMS[_KINDS[n]]}", row, 1)
    number = _KINDS[n](*found)
    return type(then)(number) if typed else number
