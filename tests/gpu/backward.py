"""Backward as autograd runs it for a GPU: in a thread that Python did not start.

Context variables do not come along, and ``threading`` knows the thread as a dummy. What torch
itself takes there comes along: whether gradients are recorded, and hooks on saved tensors.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.gpu.cuda import Cuda

__all__ = ["in_a_thread"]


def in_a_thread(cuda: Cuda, run: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autograd._engine_run_backward``, elsewhere.

    Under ``torch.func`` it stays in the calling thread, for the levels of its transforms are kept
    by thread.
    """

    def engine(*args: Any, **how: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return run(*args, **how)
        stream, quiet = cuda.current, cuda.thread.quiet
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found: dict[str, Any] = {}
        done = threading.Event()

        def body() -> None:
            try:
                cuda.thread.current[stream.index] = stream
                cuda.thread.quiet = quiet
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    found["out"] = _under(modes, hooks, lambda: run(*args, **how))
            except BaseException as error:
                found["error"] = error
            done.set()

        _thread.start_new_thread(body, ())
        if not done.wait(cuda.patience):
            raise RuntimeError("backward hangs in the device's thread")
        if "error" in found:
            raise found["error"]
        return found["out"]

    return engine


def _under(modes: list[Any], hooks: Any, run: Callable[[], Any]) -> Any:
    if modes:
        with modes[0]:
            return _under(modes[1:], hooks, run)
    if hooks is None:
        return run()
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        return run()
