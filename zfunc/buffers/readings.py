"""Numbers between host and device, without holding the host back.

A GPU runs what the host has launched some time later. To ask it for a number (``float(x)``,
``x.cpu()``, ``torch.tensor(x, device="cuda")``) is to wait until all of that is done, and meanwhile
nothing new is launched. So a step decides on a number where the number is. A number that the host
must know is read once, in a :class:`Reading`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfunc.trees.kinds import FORESEEN

__all__ = ["Reading", "number", "on_host", "sent"]


def on_host(x: Tensor) -> bool:
    """Whether the host can read a tensor at once."""
    return x.device.type == "cpu" and not FORESEEN.get()


def number(x: Any) -> Any:
    """The Python number in a 0-d tensor of the host; a number is itself.

    >>> number(torch.tensor(3)), number(2.5)
    (3, 2.5)
    """
    if not isinstance(x, Tensor):
        return x
    # `item` is an operator, which a device would be asked; `tolist` looks into the memory.
    return x.tolist() if type(x) is Tensor and on_host(x) else x.item()


def sent(value: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number as a 0-d tensor beside ``like``.

    From the host it comes as the argument of a launch: a copy of 4 bytes would be waited for.

    Args:
        value: a number, or a 0-d tensor of any device.
        dtype: that of ``like`` by default.

    >>> sent(torch.tensor(2, device="cpu"), torch.zeros(3))
    tensor(2.)
    """
    dtype = like.dtype if dtype is None else dtype
    if isinstance(value, Tensor) and (value.device == like.device or not on_host(value)):
        return value.detach().to(device=like.device, dtype=dtype)
    return torch.full((), number(value), dtype=dtype, device=like.device)


class Reading:
    """A small tensor on its way to the host.

    From a GPU it is copied into page-locked memory behind what was launched so far. ``wait``
    waits for that copy, not for what has been launched since. On a CPU nothing is copied. Copying
    or pickling a reading waits, too.

    >>> Reading(torch.tensor([1.0, 2.0])).wait()
    [1.0, 2.0]
    """

    def __init__(self, x: Tensor) -> None:
        self._event: Any = None
        self._host = x = x.detach()
        if x.device.type == "cuda":
            host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            self._host = host.copy_(x, non_blocking=True)
            self._event = torch.cuda.current_stream(x.device).record_event()

    @property
    def known(self) -> bool:
        """Whether nobody has to wait."""
        return self._event is None and on_host(self._host)

    @property
    def arrived(self) -> bool:
        """Whether it is there by now. The device is asked, and not waited for."""
        if self._event is not None and self._event.query():
            self._event = None
        return self.known

    def wait(self) -> Any:
        """The numbers, as ``tolist`` gives them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.tolist()

    def __getstate__(self) -> dict[str, Any]:
        self.wait()  # for an event belongs to this process
        return self.__dict__
