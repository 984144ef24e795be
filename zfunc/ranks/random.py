"""Functional randomness: a key decides the numbers, and nothing else does.

A key is a 0-d int64 CPU tensor: a leaf of the state like any other, saved and
sharded with it. :func:`split` and :func:`fold_in` derive new keys; the samplers
draw with a fresh ``torch.Generator`` that the key seeds, so the same key gives the
same bits on the same kind of device, and the process-global generator is neither
read nor moved.

Code that knows no keys (``F.dropout`` in somebody's module, also hidden in fused
attention) draws from the global generator. Inside :func:`scope` that generator is
a function of the key alone, and outside it nobody can tell that it was used.

torch's CPU generator takes the low 32 bits of its seed, the CUDA one all 64; keys
themselves are 64 bits wide, so only streams can coincide, never derived keys.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from zfunc.buffers.readings import number
from zfunc.errors import PlacementError
from zfunc.ranks.world import on_wait

__all__ = [
    "as_key",
    "bernoulli",
    "fold_in",
    "is_key",
    "key",
    "normal",
    "paused",
    "permutation",
    "randint",
    "scope",
    "split",
    "truncated_normal",
    "uniform",
]

Key = Tensor | int
Shape = int | Sequence[int]

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


def _stem(key: Key) -> int:
    """What the numbers are added to that are folded into a key."""
    return _mix(_word(key) ^ _FOLD)


# --- samplers ----------------------------------------------------------------------------------


def _generator(key: Key, device: torch.device | str | None) -> torch.Generator:
    device = torch.get_default_device() if device is None else device
    return torch.Generator(device).manual_seed(_signed(_word(key)))


def _size(shape: Shape) -> Sequence[int]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def uniform(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Uniform numbers in ``[low, high)``.

    >>> uniform(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    generator = _generator(key, device)
    out = torch.empty(_size(shape), dtype=dtype, device=generator.device)
    return out.uniform_(low, high, generator=generator)


def normal(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Normal numbers of the given mean and standard deviation."""
    generator = _generator(key, device)
    out = torch.empty(_size(shape), dtype=dtype, device=generator.device)
    return out.normal_(mean, std, generator=generator)


def truncated_normal(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    lower: float = -2.0,
    upper: float = 2.0,
) -> Tensor:
    """Standard normal numbers conditioned on ``[lower, upper]``, by the inverse distribution.

    Computed in float32 or wider, then cast and clamped to the bounds.
    """
    dtype = dtype or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    low, high = math.erf(lower / math.sqrt(2)), math.erf(upper / math.sqrt(2))
    out = uniform(key, shape, wide, device, low, high).erfinv_().mul_(math.sqrt(2))
    return out.to(dtype).clamp_(lower, upper)


def bernoulli(
    key: Key,
    p: float | Tensor = 0.5,
    shape: Shape | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coins: ``True`` with probability ``p``.

    Args:
        key: a key or an int.
        p: a number, or a tensor of probabilities that broadcasts to ``shape``.
        shape: of the result; by default that of ``p``.
        device: of the result; by default that of ``p``.

    Returns:
        bool tensor.

    >>> bernoulli(key(0), 1.0, (3,))
    tensor([True, True, True])
    """
    if isinstance(p, Tensor):
        shape = p.shape if shape is None else shape
        device = p.device if device is None else device
    return uniform(key, () if shape is None else shape, torch.float32, device) < p


def randint(
    key: Key,
    low: int,
    high: int,
    shape: Shape = (),
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Integers in ``[low, high)``, of the given shape."""
    generator = _generator(key, device)
    return torch.randint(
        low, high, _size(shape), generator=generator, dtype=dtype, device=generator.device
    )


def permutation(key: Key, x: int | Tensor, device: torch.device | str | None = None) -> Tensor:
    """A random order: of ``range(x)`` (int64 ``[x]``), or of the rows of a tensor.

    >>> sorted(permutation(key(0), 4).tolist())
    [0, 1, 2, 3]
    """
    if isinstance(x, Tensor):
        return x[permutation(key, x.shape[0], x.device)]
    generator = _generator(key, device)
    return torch.randperm(x, generator=generator, device=generator.device)


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


def _generators() -> list[torch.Generator]:
    recorded = _watchers and _watchers[-1].recording  # then the GPU's is the graph's
    if torch.cuda.is_initialized() and not recorded:
        device = torch.cuda.default_generators[torch.cuda.current_device()]
        return [torch.default_generator, device]
    return [torch.default_generator]


def _save() -> State:
    return [(generator, generator.get_state()) for generator in _generators()]


def _restore(state: State) -> None:
    for generator, value in state:
        generator.set_state(value)


def _acquire() -> None:
    # On CUDA backward runs in autograd's own threads. Whoever started it waits for them, perhaps
    # inside a scope: there they are guests, and waiting for the lock would be for ever.
    guest = isinstance(threading.current_thread(), threading._DummyThread)
    _thread.owner = _GLOBAL.acquire(blocking=not guest)


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
        self.seed, self.path = _signed(_word(key)), path_of(key)

    @classmethod
    def folded(cls, key: Key) -> Callable[[int], scope]:
        """``data -> scope(fold_in(key, data))``, without a tensor on the way."""
        stem, path = _stem(key), path_of(key)

        def of(data: int) -> scope:
            made = cls.__new__(cls)
            made.seed = _signed(_mix(stem + _GOLDEN * data))
            made.path = None if path is None else (*path, data)
            return made

        return of

    def __enter__(self) -> None:
        if _watchers:
            _watchers[-1].enter(self.path)  # it may refuse
        if not _thread.found:
            _acquire()
        _thread.found.append(_save())
        for generator, _ in _thread.found[-1]:
            generator.manual_seed(self.seed)

    def __exit__(self, *exception: Any) -> None:
        _restore(_thread.found.pop())
        if _watchers:
            _watchers[-1].leave()
        if not _thread.found:
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
