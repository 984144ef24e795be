"""Plain data that ranks exchange: as JSON, never as a pickle, which could run code.

A gloo connection does not ask who is at the other end. So what comes out of one is read as data: it
may be wrong, but it cannot do anything.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

__all__ = ["read", "written"]

PLAIN = (bool, int, float, str)


def written(obj: Any) -> bytes:
    """An object as a message.

    Args:
        obj: ``None``, a number, string, path, bytes, or lists, tuples and dicts of such.

    Raises:
        TypeError: it holds something else; the message says where.

    >>> read(written({"step": 3, ("a", 1): [b"x", None]}))
    {'step': 3, ('a', 1): [b'x', None]}
    """
    return json.dumps(_tagged(obj, "the object"), separators=(",", ":")).encode()


def read(data: bytes) -> Any:
    """The object that a message holds.

    Raises:
        ValueError: it is no message.
    """
    try:
        return _plain(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no message of zfunc: {error!r}") from error


def _tagged(x: Any, where: str) -> Any:
    if x is None or type(x) in PLAIN:
        return x
    if type(x) is list:
        return [_tagged(part, f"{where}[{i}]") for i, part in enumerate(x)]
    if type(x) is tuple:
        return {"tuple": [_tagged(part, f"{where}[{i}]") for i, part in enumerate(x)]}
    if type(x) is dict:
        return {
            "dict": [
                [_tagged(key, f"a key of {where}"), _tagged(value, f"{where}[{key!r}]")]
                for key, value in x.items()
            ]
        }
    if type(x) is bytes:
        return {"bytes": x.hex()}
    if isinstance(x, PurePath):
        return {"path": str(x)}
    raise TypeError(
        f"{where} is a {type(x).__name__}: ranks exchange None, numbers, strings, paths, bytes, "
        "lists, tuples and dicts of such. Send tensors with psum or all_gather"
    )


def _plain(x: Any) -> Any:
    if isinstance(x, list):
        return [_plain(part) for part in x]
    if not isinstance(x, dict):
        return x
    [(kind, held)] = x.items()
    if kind == "tuple":
        return tuple(_plain(part) for part in held)
    if kind == "dict":
        return {_plain(key): _plain(value) for key, value in held}
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "path":
        return Path(held)
    raise ValueError(f"an unknown kind, {kind!r}")
