"""Keys decide random numbers, and nothing else does.

A key is a 0-d int64 CPU tensor: a leaf of the state like any other, saved and sharded with it.
:func:`split` and :func:`fold_in` derive new keys. ``zfunc.ranks.random`` draws numbers with them.

Code that knows no keys (``F.dropout`` in somebody's module, also hidden in fused attention) draws
from torch's global generator. Inside :func:`scope` that generator is a function of the key alone,
and outside it nobody can tell that it was used.

torch's CPU generator takes the low 32 bits of its seed, the CUDA one all 64; keys themselves are 64
bits wide, so only streams can coincide, never derived keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from zfunc.buffers.readings import number
from zfunc.errors import PlacementError
from zfunc.ranks.world import on_wait

__all__ = [
    "STEP",
    "Key",
    "as_key",
    "fold_in",
    "generator_of",
    "is_key",
    "key",
    "path_of",
    "paused",
    "scope",
    "split",
    "watched",
]

Key = Tensor | int

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of splitmix64
_SEED, _SPLIT, _FOLD = 0x5A46554E43000001, 0x5A46554E43000002, 0x5A46554E43000003


# --- keys --------------------------------------------------------------------------------------


def _mix(x: int) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64 bits."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _word(x: Key) -> int:
    """The 64 bits of a key, as a Python int; an int stands for ``key(int)``."""
    if isinstance(x, Tensor):
        if x.dtype != torch.int64 or x.dim() != 0:
            raise PlacementError(
                f"a key is a 0-d int64 tensor, not {str(x.dtype).removeprefix('torch.')} of shape "
                f"{tuple(x.shape)}. Make one with zf.random.key(seed); split() gives a 1-d tensor "
                "of keys: take one of its elements."
            )
        return int(number(x)) & _WORD
    if isinstance(x, int) and not isinstance(x, bool):
        return _mix(_SEED + _GOLDEN * x)
    raise PlacementError(
        f"a key is a 0-d int64 tensor or an int, not {type(x).__name__} ({x!r}). "
        "Make one with zf.random.key(seed)."
    )


def key(seed: Key) -> Tensor:
    """The key of an integer seed.

    Args:
        seed: any Python int, or a 0-d int64 tensor, which is a key already.

    Returns:
        0-d int64 CPU tensor.

    Raises:
        PlacementError: ``seed`` is neither.

    >>> key(0).dtype, key(0).shape, bool(key(0) == key(1))
    (torch.int64, torch.Size([]), False)
    """
    return _marked(torch.tensor(_signed(_word(seed)), device="cpu"))


as_key = key


def _marked(key: Tensor) -> Tensor:
    key.__dict__["_zfunc_key"] = True
    return key


def is_key(x: object) -> bool:
    """Whether a tensor comes from :func:`key` or :func:`fold_in`; its copies do not know.

    >>> is_key(key(0)), is_key(torch.tensor(0))
    (True, False)
    """
    return isinstance(x, Tensor) and "_zfunc_key" in x.__dict__


def split(key: Key, n: int = 2) -> Tensor:
    """``n`` new keys, as an int64 CPU tensor of shape ``[n]``; iterate over it or unpack it.

    >>> init, train = split(key(0))
    >>> bool(init == train)
    False
    """
    start = _mix(_word(key) ^ _SPLIT)
    return torch.tensor(
        [_signed(_mix(start + _GOLDEN * i)) for i in range(1, n + 1)],
        dtype=torch.int64,
        device="cpu",
    )


def fold_in(key: Key, data: int | Tensor) -> Tensor:
    """A new key from a key and a number (a step, a rank, a layer's index).

    Args:
        key: a key or an int.
        data: an int, or a 0-d integer tensor such as ``state.step``.

    Returns:
        0-d int64 CPU tensor; different for different ``data``.

    Raises:
        PlacementError: ``data`` is not one integer.

    >>> bool(fold_in(key(0), 3) == fold_in(key(0), torch.tensor(3)))
    True
    """
    counts = isinstance(data, Tensor) and "_zfunc_step" in data.__dict__
    if isinstance(data, Tensor):
        if data.dim() != 0 or data.is_floating_point() or data.is_complex():
            raise PlacementError(
                f"fold_in takes one integer, not {data.dtype} of shape {tuple(data.shape)}. "
                "Fold several numbers in one after the other."
            )
        data = int(number(data))
    elif not isinstance(data, int):
        raise PlacementError(f"fold_in takes an int or a 0-d integer tensor, not {data!r}.")
    made = _marked(torch.tensor(_signed(_mix(_stem(key) + _GOLDEN * data)), device="cpu"))
    if (path := path_of(key)) is not None:
        made.__dict__["_zfunc_path"] = (*path, STEP if counts else data)
    return made


def generator_of(key: Key, device: torch.device | str | None = None) -> torch.Generator:
    """A fresh generator on a device, torch's default one if left out, that a key seeds."""
    device = torch.get_default_device() if device is None else device
    return torch.Generator(device).manual_seed(_signed(_word(key)))


def _stem(key: Key) -> int:
    """What the numbers are added to that are folded into a key."""
    return _mix(_word(key) ^ _FOLD)


# --- the global generator as a function of a key -----------------------------------------------

State = list[tuple[torch.Generator, Tensor]]


class _Thread(threading.local):
    """The scopes open in this thread: what each found, outermost first."""

    def __init__(self) -> None:
        self.found: list[State] = []
        self.owner = False


# Ranks that are threads share the global generators, so one thread at a time is in a scope.
_GLOBAL = threading.Lock()
_thread = _Thread()


def _save() -> State:
    found = [(torch.default_generator, torch.default_generator.get_state())]
    recorded = _watchers and _watchers[-1].recording  # then the GPU's is the graph's
    if not recorded and torch.cuda.is_initialized():
        device = torch.cuda.default_generators[torch.cuda.current_device()]
        found.append((device, device.get_state()))
    return found


def _restore(state: State) -> None:
    for generator, value in state:
        generator.set_state(value)


def _acquire() -> None:
    _thread.owner = _GLOBAL.acquire(blocking=False)
    if _thread.owner:
        return
    # On CUDA backward runs in autograd's own threads. Whoever started it waits for them, perhaps
    # inside a scope: there they are guests, and waiting for the lock would be for ever.
    guest = isinstance(threading.current_thread(), threading._DummyThread)
    _thread.owner = not guest and _GLOBAL.acquire()


def _release() -> None:
    if _thread.owner:
        _thread.owner = False
        _GLOBAL.release()


class scope:
    """Within it, torch's global generator is a function of ``key`` alone.

    ``with scope(key): y = module(x)`` seeds the global CPU generator (and that of
    the current CUDA device), and on leaving puts back what it found, so that
    dropout anywhere inside ``module`` depends on the key and leaves no trace.
    Scopes nest: an inner one gives back the outer one's stream where it was.

    Only one thread at a time is in a scope; others wait. A simulated rank that
    waits for its peers inside a scope lets them in (see :func:`paused`).

    Raises:
        PlacementError: a bad key.

    >>> with scope(key(1)):
    ...     a = torch.rand(3)
    >>> with scope(key(1)):
    ...     b = torch.rand(3)
    >>> torch.equal(a, b)
    True
    """

    __slots__ = ("path", "seed")

    def __init__(self, key: Key) -> None:
        self.seed, self.path = _word(key), path_of(key)

    @classmethod
    def folded(cls, key: Key) -> Callable[[int], scope]:
        """``data -> scope(fold_in(key, data))``, without a tensor on the way."""
        return cls(key).inner()

    def inner(self) -> Callable[[int], scope]:
        """``data -> scope(fold_in(key, data))`` for the key of this one."""
        stem, path, cls = _mix(self.seed ^ _FOLD), self.path, type(self)

        def of(data: int) -> scope:
            made = cls.__new__(cls)
            made.seed = _mix(stem + _GOLDEN * data)
            made.path = None if path is None else (*path, data)
            return made

        return of

    def __enter__(self) -> None:
        if _watchers:
            _watchers[-1].enter(self.path)  # it may refuse
        if not (scopes := _thread.found):
            _acquire()
        scopes.append(found := _save())
        for generator, _ in found:
            generator.manual_seed(self.seed)

    def __exit__(self, *exception: Any) -> None:
        scopes = _thread.found
        for generator, value in scopes.pop():
            generator.set_state(value)
        if _watchers:
            _watchers[-1].leave()
        if not scopes:
            _release()


@contextmanager
def paused() -> Iterator[None]:
    """Step out of the open scopes for a while, and come back to the same stream.

    A simulated rank does so while it waits at a rendezvous: its peers are threads
    that need the global generator to get there.
    """
    if not _thread.found:
        yield
        return
    stream = _save()
    _restore(_thread.found[0])
    _release()
    try:
        yield
    finally:
        _acquire()
        _thread.found[0] = _save()  # an unscoped draw may have moved it meanwhile
        _restore(stream)


on_wait.append(paused)


# --- how keys were derived, for a step that is recorded ----------------------------------------

STEP = "step"
"""Stands in a key's path for the state's step count, which differs from call to call."""


class Watcher(Protocol):
    """Is told of scopes as they open and close."""

    recording: bool

    def enter(self, path: tuple[Any, ...] | None) -> None: ...

    def leave(self) -> None: ...


_watchers: list[Watcher] = []  # not a context variable: backward opens scopes in threads of its own


def path_of(key: Key) -> tuple[Any, ...] | None:
    """What has been folded into the watched key to make this one; ``None`` of another."""
    return key.__dict__.get("_zfunc_path") if isinstance(key, Tensor) else None


@contextmanager
def watched(watcher: Watcher, key: Any, step: Any) -> Iterator[None]:
    """Tell ``watcher`` of all scopes inside the block, and how ``key`` and ``step`` made theirs."""
    marks = [(key, "_zfunc_path", ()), (step, "_zfunc_step", True)]
    for x, name, value in marks:
        if isinstance(x, Tensor):
            x.__dict__[name] = value
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        for x, name, _ in marks:
            if isinstance(x, Tensor):
                x.__dict__.pop(name, None)
