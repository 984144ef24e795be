"""Which names of torch are pretended while :class:`tests.gpu.cuda.Cuda` is entered.

All of them are torch's own, but two: ``kernels.dispatch.launcher``, since a kernel that cannot run
needs its twin, and nothing else of the project. Every name is put back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.gpu import backward, collectives, graphs, launchers, streams, transfers

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["installed"]

_ABSENT = object()
Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def installed(cuda: Cuda) -> Iterator[None]:
    """All names are pretended inside, and put back behind."""
    with contextlib.ExitStack() as stack:
        for place, name, value in _patches(cuda):
            had = vars(place).get(name, _ABSENT)
            setattr(place, name, value)
            stack.callback(_put_back, place, name, had)
        yield


def _put_back(place: Any, name: str, had: Any) -> None:
    if had is _ABSENT:
        delattr(place, name)
    else:
        setattr(place, name, had)


def _patches(cuda: Cuda) -> list[Patch]:
    from zfunc.kernels import dispatch

    methods = transfers.methods(cuda)
    rows: list[Patch] = [(Tensor, name, value) for name, value in methods.items()]
    rows += _ghosts(methods)
    rows += [(torch, name, value) for name, value in transfers.makers(cuda).items()]
    rows += [(torch.cuda, name, value) for name, value in _module(cuda).items()]
    rows += [(torch.accelerator, name, value) for name, value in _accelerator(cuda).items()]
    rows += collectives.patches()
    rows += [
        (torch, "Generator", _Generator),
        (torch.autograd, "_engine_run_backward", _engine(cuda)),
        (threading.Thread, "run", _seen(cuda, threading.Thread.run)),
        (dispatch, "launcher", launchers.watched(cuda, dispatch.launcher)),
    ]
    if dispatch.installed():
        from triton.runtime.jit import JITFunction

        rows.append((JITFunction, "run", launchers.launched(cuda, JITFunction.run)))
    return rows


def _ghosts(methods: dict[str, Any]) -> list[Patch]:
    """Ghosts know torch's names by identity: they know the pretended ones, too."""
    from zfunc.rehearsal import ghosts, known

    assert known
    asked = {x.__get__ if isinstance(x, property) else x: name for name, x in methods.items()}
    true = {name: getattr(Tensor, name) for name in methods}
    true = {name: x if callable(x) else x.__get__ for name, x in true.items()}
    metadata = {x for x, name in asked.items() if true[name] in ghosts.METADATA}
    rules = {x: ghosts.RULES[true[name]] for x, name in asked.items() if true[name] in ghosts.RULES}
    return [
        (ghosts, "METADATA", ghosts.METADATA | metadata),
        (ghosts, "RULES", {**ghosts.RULES, **rules}),
    ]


def _engine(cuda: Cuda) -> Callable[..., Any]:
    return backward.in_a_thread(cuda, torch.autograd._engine_run_backward)


def _seen(cuda: Cuda, run: Callable[[threading.Thread], None]) -> Callable[..., None]:
    """Threads that the project starts are seen, too."""

    def seen(thread: threading.Thread) -> None:
        with cuda.seeing():
            run(thread)

    return seen


class _Generator(torch._C.Generator):
    """A generator that may say it is the GPU's; it draws as the host's do."""

    def __new__(cls, device: Any = "cpu") -> Any:
        goal = torch.device(device)
        if goal.type != "cuda":
            return torch._C.Generator(device)
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made._goal = torch.device("cuda", goal.index or 0)
        made._current = made
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._goal  # type: ignore[attr-defined, no-any-return]

    def graphsafe_get_state(self) -> Any:
        return self._current

    def graphsafe_set_state(self, state: Any) -> None:
        self._current = state


def _accelerator(cuda: Cuda) -> dict[str, Any]:
    """The functions of ``torch.accelerator``."""
    there = torch.device("cuda")
    return {
        "is_available": lambda: cuda.devices > 0,
        "device_count": lambda: cuda.devices,
        "current_accelerator": lambda check_available=False: there if cuda.devices else None,
        "current_device_index": lambda: cuda.device,
        "current_device_idx": lambda: cuda.device,
        "current_stream": lambda device=None: cuda.current,
    }


def _module(cuda: Cuda) -> dict[str, Any]:
    """The functions of ``torch.cuda``."""
    generators = tuple(_Generator(f"cuda:{i}") for i in range(cuda.devices))
    properties = SimpleNamespace(
        multi_processor_count=132,
        name="Pretended GPU",
        total_memory=80 * 2**30,
        major=9,
        minor=0,
        warp_size=32,
        gcnArchName="",
        max_threads_per_multi_processor=2048,
    )

    def index(device: Any = None) -> int:
        if device is None:
            return cuda.device
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return cuda.device if found is None else found

    def set_device(device: Any) -> None:
        if not 0 <= index(device) < cuda.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        cuda.device = index(device)

    @contextlib.contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = cuda.device
        cuda.device = index(device)
        try:
            yield
        finally:
            cuda.device = before

    def synchronize(device: Any = None) -> None:
        for actor in list(cuda.actors.values()):
            cuda.host.learn(actor.clock)
        cuda.sync("torch.cuda.synchronize")
        for work in list(cuda.collectives):
            work.finish()

    def locked(address: int, nbytes: int, flags: int = 0) -> int:
        from tests.gpu.cuda import TABLE

        TABLE.lock(address, nbytes)
        cuda.note("pin", "cudaHostRegister", nbytes=nbytes)
        return 0

    def unlocked(address: int) -> int:
        from tests.gpu.cuda import TABLE

        memory = TABLE.unlock(address)
        if memory is not None:
            for use in memory.uses.unseen(cuda.host):
                cuda.note("race", f"page-locked memory given back while {use.actor} may use it")
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=locked,
        cudaHostUnregister=unlocked,
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: f"error {code}",
    )
    return {
        "is_available": lambda: cuda.devices > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: cuda.devices,
        "current_device": lambda: cuda.device,
        "set_device": set_device,
        "device": on_device,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[cuda.device].manual_seed(seed),
        "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in generators] and None,
        "get_rng_state": lambda device=None: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index(device)].set_state(state),
        "Stream": streams.opened,
        "Event": streams.Event,
        "stream": streams.StreamContext,
        "StreamContext": streams.StreamContext,
        "current_stream": lambda device=None: cuda.current,
        "default_stream": lambda device=None: cuda.defaults[index(device)],
        "set_stream": lambda stream: cuda.thread.current.update({stream.index: stream}),
        "synchronize": synchronize,
        "cudart": lambda: runtime,
        "check_error": lambda code: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (70 * 2**30, 80 * 2**30),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
        **graphs.module(cuda),
    }
