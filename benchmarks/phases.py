"""Where torch's pipeline spends a step: forward, backward, messages, optimizer, the rest.

``torch.distributed.pipelining`` has no meter of its own, so methods of a stage are wrapped, and the
two functions of its schedules through which all messages go. The loss is no part of forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import optim
from torch.distributed.pipelining import schedules

STAGE = {"forward_one_chunk": "forward", "backward_one_chunk": "backward"}
SCHEDULE = {"_batch_p2p": "post", "_wait_batch_p2p": "wait"}
NAMES = (*STAGE.values(), "loss", *SCHEDULE.values(), "optimizer")


class Phases:
    """Seconds by phase; a phase inside of another counts in the outer one alone."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*NAMES, "whole"), 0.0)
        self.inside = False

    def clear(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return call(*args, **kwargs)
            self.inside, begun = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside = False
                self.seconds[name] += time.perf_counter() - begun

        return run

    def watch_torch(self, stage: Any, optimizer: optim.Optimizer) -> None:
        """Time one stage of this process, and every message."""
        for method, name in STAGE.items():
            setattr(stage, method, self.timed(name, getattr(stage, method)))
        for function, name in SCHEDULE.items():
            setattr(schedules, function, self.timed(name, getattr(schedules, function)))
        single = schedules.PipelineScheduleSingle
        single._maybe_compute_loss = self.timed("loss", single._maybe_compute_loss)
        optimizer.step = self.timed("optimizer", optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def whole(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds["whole"] += time.perf_counter() - begun

    def by_step(self, count: int) -> dict[str, float]:
        """Milliseconds of a step, ``rest`` being what no phase has."""
        found = {name: 1e3 * seconds / count for name, seconds in self.seconds.items()}
        whole = found.pop("whole")
        return {**found, "rest": whole - sum(found.values()), "whole": whole}
