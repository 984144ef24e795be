"""Ctrl-C and errors in a donated step: nobody is left without a state, or with half of one."""

from __future__ import annotations

import _signal
import dataclasses
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import zfunc as zf
from tests import warm
from tests.laws.cases import ADAMW, bits, named, trained
from tests.laws.models import stack, stack_loss
from zfunc import optim
from zfunc.engine import interrupts
from zfunc.transforms.capture import Captured

CASE = trained(stack, stack_loss)


def nothing() -> None:
    pass


class Somewhere:
    """A step with a place before, in and behind its optimizer where something can happen."""

    def __init__(self) -> None:
        self.happens: dict[str, Callable[[], Any]] = {}
        self.tx = optim.GradientTransformation(ADAMW.init, self._update, checked=True)

    def _update(self, grads: Any, state: Any, params: Any = None) -> Any:
        self.happens.get("before the update", nothing)()
        out = ADAMW.update(grads, state, params)
        self.happens.get("after the update", nothing)()
        return out

    def __call__(self, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            self.happens.get("in the loss", nothing)()
            return stack_loss(params, batch)

        old = state if isinstance(state, dict) else vars(state) | {"params": state.params}
        loss, grads = zf.value_and_grad(loss_fn)(old["params"])
        updates, opt_state = self.tx.update(grads, old["opt_state"], old["params"])
        params = optim.apply_updates(old["params"], updates)
        new = {"params": params, "opt_state": opt_state, "step": old["step"] + 1}
        self.happens.get("at the end", nothing)()
        return ({**state, **new} if isinstance(state, dict) else state.replace(**new)), loss


PLACES = ("in the loss", "before the update", "after the update", "at the end")


def start(form: str) -> Any:
    state = CASE.state(ADAMW, torch.float64)
    if form == "TrainState":
        return state
    entries = {"params": state.params, "opt_state": state.opt_state, "step": state.step}
    return entries | ({"epoch": 0} if form == "dict that counts" else {})


def batch(i: int) -> Any:
    return CASE.batch(i, torch.float64)


def digest(state: Any) -> Any:
    return {name: bits(x) if isinstance(x, torch.Tensor) else x for name, x in named(state).items()}


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def handler(of_ctrl_c: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, of_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


WRAPS: dict[str, Callable[[Any, Path], Any]] = {
    "bare": lambda step, path: step,
    "stage 1": lambda step, path: zf.shard(step, stage=1),
    "stage 3": lambda step, path: zf.shard(step, stage=3),
    "in host memory": lambda step, path: zf.offload(zf.shard(step, stage=3), to="cpu"),
    "on disk": lambda step, path: zf.offload(zf.shard(step, stage=3), to="disk", path=path),
    "in 16 bits": lambda step, path: zf.precision(zf.shard(step, stage=3), torch.bfloat16),
    "compressed": lambda step, path: zf.compress_grads(zf.shard(step, stage=3), method="int8"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_ctrl_c_leaves_the_new_state_under_the_old_name(
    place: str, wrap: str, tmp_path: Path
) -> None:
    fn = Somewhere()
    with WRAPS[wrap](zf.donate(fn), tmp_path / "there") as step:
        state = step.place(start("TrainState"))
        wanted = []
        for i in range(3):
            state, _ = step(state, batch(i))
            wanted.append(digest(step.unplace(state)))
    with WRAPS[wrap](zf.donate(fn), tmp_path / "here") as step:
        state = step.place(start("TrainState"))
        kept, (before, _) = state, step(state, batch(0))
        params, state = before.params, before
        del kept, before
        fn.happens[place] = ctrl_c
        with handler(signal.default_int_handler), pytest.raises(KeyboardInterrupt) as caught:
            state, _ = step(state, batch(1))
        fn.happens.clear()
        assert any("the step was completed" in note for note in caught.value.__notes__)
        assert digest(step.unplace(state)) == wanted[1]
        zf.tree.check_alive(params)  # other names for its parts hold the new values, too
        state, _ = step(state, batch(2))
        assert digest(step.unplace(state)) == wanted[2]


@pytest.mark.parametrize("form", ["TrainState", "dict", "dict that counts"])
def test_ctrl_c_with_states_of_any_form(form: str) -> None:
    fn = Somewhere()

    def counted(state: Any, batch: Any) -> Any:
        new, loss = fn(state, batch)
        return (new | {"epoch": new["epoch"] + 1} if "counts" in form else new), loss

    step = zf.donate(counted)
    wanted, _ = step(step.place(start(form)), batch(0))
    fn.happens["after the update"] = ctrl_c
    state = step.place(start(form))
    with handler(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        step(state, batch(0))
    assert digest(state) == digest(wanted)


def grows(state: Any, batch: Any) -> Any:
    """A step whose new state the old one cannot be made to hold."""
    ctrl_c()
    return (*state, torch.zeros(1)), None


def still(state: Any, batch: Any) -> Any:
    return state, None


def returned(step: Any, state: Any) -> Any:
    """The state that the step returns; Ctrl-C would end pytest."""
    try:
        return step(state, None)[0]
    except KeyboardInterrupt:
        pytest.fail("the step was interrupted")


def test_a_state_that_cannot_become_the_new_one_is_returned_and_the_next_step_interrupted() -> None:
    step = zf.donate(grows)
    with handler(signal.default_int_handler):
        state = returned(step, (torch.ones(2),))
        assert len(state) == 2
        with pytest.raises(KeyboardInterrupt):
            step(state, None)
        zf.tree.check_alive(state)


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_as_soon_as_the_handler_is_put_back(
    presses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = presses

    def pressed(signum: int, to: Any) -> Any:
        nonlocal left
        before = _signal.signal(signum, to)
        if to is signal.default_int_handler and left:
            left -= 1
            ctrl_c()
        return before

    step = zf.donate(grows)
    with handler(signal.default_int_handler):
        with monkeypatch.context() as patch:
            hands = SimpleNamespace(getsignal=_signal.getsignal, signal=pressed)
            patch.setattr(interrupts, "_signal", hands)
            state = returned(step, (torch.ones(2),))
        assert left == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            step(state, None)
        zf.tree.check_alive(state)
        returned(zf.donate(still), state)  # and no other one is left


def test_a_postponed_ctrl_c_is_for_the_handler_of_its_time() -> None:
    calls = []

    def mine(signum: int, frame: Any) -> None:
        calls.append(signum)

    with handler(signal.default_int_handler):
        state = returned(zf.donate(grows), (torch.ones(2),))
        with handler(mine):
            state = returned(zf.donate(still), state)
            assert calls == [signal.SIGINT]
            returned(zf.donate(still), state)
        assert calls == [signal.SIGINT]


def test_a_postponed_ctrl_c_is_dropped_where_none_is_heard() -> None:
    with handler(signal.default_int_handler):
        state = returned(zf.donate(grows), (torch.ones(2),))
        with handler(signal.SIG_IGN):
            state = returned(zf.donate(still), state)
        returned(zf.donate(still), state)


ENDED = """
import signal, torch, zfunc as zf
def grows(state, batch):
    signal.raise_signal(signal.SIGINT)
    return (*state, torch.zeros(1)), None
signal.signal(signal.SIGINT, signal.default_int_handler)
state, _ = zf.donate(grows)((torch.ones(2),), None)
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("returned", flush=True)
try:
    zf.donate(grows)(state, None)
finally:
    print("went on", flush=True)
"""


def test_a_postponed_ctrl_c_ends_the_process_where_every_one_does() -> None:
    ended = warm.run([sys.executable, "-c", ENDED], stdout=warm.PIPE, text=True)
    assert (ended.stdout, ended.returncode) == ("returned\n", -signal.SIGINT)


def test_the_second_ctrl_c_does_not_wait() -> None:
    fn, seen = Somewhere(), []

    def twice() -> None:
        ctrl_c()
        seen.append("once")
        ctrl_c()
        seen.append("twice")

    fn.happens["in the loss"] = twice
    step = zf.donate(fn)
    state = step.place(start("TrainState"))
    wanted = digest(state)
    with handler(signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt):
            step(state, batch(0))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert seen == ["once"]
    assert digest(state) == wanted  # nothing had been overwritten


def test_the_handler_of_the_user_is_called_once_and_put_back() -> None:
    fn, calls = Somewhere(), []

    def mine(signum: int, frame: Any) -> None:
        calls.append(signum)

    step = zf.donate(fn)
    fn.happens["after the update"] = ctrl_c
    state = step.place(start("TrainState"))
    with handler(mine):
        new, _ = step(state, batch(0))  # it does not raise, so the step returns
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine

        def other(signum: int, frame: Any) -> None:
            calls.append(-1)

        fn.happens["after the update"] = lambda: signal.signal(signal.SIGINT, other)
        step(new, batch(1))  # a step may install a handler of its own
        assert signal.getsignal(signal.SIGINT) is other


@pytest.mark.parametrize("ours", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_is_left_alone(ours: Any) -> None:
    seen = []
    fn = Somewhere()
    fn.happens["in the loss"] = lambda: seen.append(signal.getsignal(signal.SIGINT))
    step = zf.donate(fn)
    state = step.place(start("TrainState"))
    with handler(ours):
        step(state, batch(0))
    assert seen == [ours]


def test_other_threads_touch_no_handler() -> None:
    seen = []
    fn = Somewhere()
    fn.happens["in the loss"] = lambda: seen.append(signal.getsignal(signal.SIGINT))
    step = zf.donate(zf.shard(fn, stage=3))
    before = signal.getsignal(signal.SIGINT)
    zf.simulate(2)(lambda: step(step.place(start("TrainState")), batch(0)))()
    assert seen == [before] * 2


def test_a_step_without_donate_is_interrupted_at_once() -> None:
    fn, seen = Somewhere(), []
    fn.happens["in the loss"] = ctrl_c
    fn.happens["before the update"] = lambda: seen.append(1)
    with handler(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        zf.Step(fn)(start("TrainState"), batch(0))
    assert not seen


# Errors


def fails() -> None:
    raise LookupError("somewhere")


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("place", PLACES)
def test_an_error_leaves_the_state_whole_or_says_that_it_is_spent(
    wrap: str, place: str, tmp_path: Path
) -> None:
    fn = Somewhere()
    with WRAPS[wrap](zf.donate(fn), tmp_path / "state") as step:
        state, _ = step(step.place(start("TrainState")), batch(0))
        wanted = digest(step.unplace(state))
        fn.happens[place] = fails
        with pytest.raises(LookupError) as caught:
            step(state, batch(1))
        fn.happens.clear()
        told = any("which is spent" in note for note in getattr(caught.value, "__notes__", ()))
        assert not (told and place in PLACES[:2])
        if not told:
            assert digest(step.unplace(state)) == wanted
            step(state, batch(1))
            return
        for use in (
            lambda: step(state, batch(1)),
            lambda: step.unplace(state),
            lambda: zf.save(tmp_path / "saved", state),
        ):
            with pytest.raises(zf.DonatedStateError, match=r"failed \(LookupError\).*checkpoint"):
                use()


def test_parameters_that_autograd_tracks_are_spent_with_the_step_that_failed(
    tmp_path: Path,
) -> None:
    tx = optim.sgd(0.1)  # no moments that could show it
    weight = torch.nn.Parameter(torch.ones(4))

    def half(state: Any, batch: Any) -> Any:
        _, grads = zf.value_and_grad(lambda p: (p["w"] * batch).sum())(state.params)
        updates, _ = tx.update(grads, state.opt_state, state.params)
        new = zf.trees.memory.reuse(state.params["w"])
        new += updates["w"]
        raise LookupError("half way")

    state = zf.TrainState.create({"w": weight}, tx)
    with pytest.raises(LookupError):
        zf.donate(half)(state, torch.ones(4))
    with pytest.raises(zf.DonatedStateError, match="LookupError"):
        zf.save(tmp_path, state)


# At any moment


def one_step(stage: int | None) -> tuple[Any, Any]:
    bare = zf.train_step(lambda p, x: (torch.tanh(x @ p["a"]) @ p["b"]).square().mean(), ADAMW)
    step = zf.donate(bare if stage is None else zf.shard(bare, stage=stage))
    start = {"a": torch.ones(4, 4), "b": torch.ones(4, 1)}
    return step, lambda: step.place(zf.TrainState.create(start, ADAMW))


X = torch.eye(4)


@dataclasses.dataclass(frozen=True)
class Around(zf.Transform):
    """A guard of the user's own, outside of that of `donate`."""

    position: ClassVar[int] = 900

    def guard(self, call: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
        out = call(state, args, kwargs)
        nothing()
        return out


OUTERMOST = (zf.Step.__call__.__code__, Captured.__call__.__code__)


@pytest.mark.parametrize("kind", ["bare", "stage 1", "stage 3", "guarded", "captured"])
def test_ctrl_c_in_any_line_of_a_step_and_behind_any_call(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, begin = one_step(int(kind[-1]) if kind.startswith("stage") else None)
    if kind == "guarded":
        step = step.wrap(Around())
    if kind == "captured":  # what runs in its place needs no GPU
        monkeypatch.setattr(Captured, "_call", lambda self, *given: self.step._call(*given))
        step = zf.captured(step)
    state, _ = step(begin(), X)
    before, after = digest(step.unplace(begin())), digest(step.unplace(state))
    moments = 0

    def interrupted(state: Any, press_at: int = -1) -> bool:
        nonlocal moments

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal moments
            # What is raised as a function returns is raised in the one that has called it.
            returns = event == "return" and frame.f_code not in OUTERMOST
            if event == "line" or returns:
                moments += 1
                if moments == press_at:
                    ctrl_c()
            return trace

        moments, outer = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            state, _ = step(state, X)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(outer)
        return False

    with handler(signal.default_int_handler):
        counts = []
        for _ in range(5):  # the first calls of a step do more than those that follow
            assert not interrupted(begin())
            counts.append(moments)
        total, hits = min(counts), 0  # in some the garbage is collected
        assert total > 300
        for press_at in [*range(1, total, total // 60), *range(total - 60, total + 1)]:
            state = begin()
            hit = interrupted(state, press_at)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if not hit:
                continue  # this one had a few moments less
            hits += 1
            assert digest(step.unplace(state)) in (before, after)
        assert hits > 60


def in_the_callers_line(error: BaseException) -> bool:
    """Whether it was raised there, and not in anything that is called there."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    return files <= {__file__, signal.__file__}


@pytest.mark.parametrize("stage", [None, 3])
def test_ctrl_c_at_any_moment_of_a_loop(stage: int | None) -> None:
    step, begin = one_step(stage)
    wanted = [digest(step.unplace(state := begin()))]
    for _ in range(20):
        state, _ = step(state, X)
        wanted.append(digest(step.unplace(state)))
    moments = random.Random(0)
    alarm = signal.signal(signal.SIGALRM, lambda *_: ctrl_c())
    try:
        with handler(signal.default_int_handler):
            for _ in range(60):
                state = begin()
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4 + 0.01 * moments.random())
                    while True:
                        state, _ = step(state, X)
                except KeyboardInterrupt as error:
                    if in_the_callers_line(error):  # the one moment that is left
                        continue
                    n = int(state.step)
                    assert n >= len(wanted) or digest(step.unplace(state)) == wanted[n]
                    step(state, X)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)


def interrupted_rank(place: str) -> list[tuple[bool, bool]]:
    """At stages 1 and 3 on a rank of its own."""
    return [interrupted_at(place, stage) for stage in (1, 3)]


def interrupted_at(place: str, stage: int) -> tuple[bool, bool]:
    """``(was interrupted, holds the new values)``."""
    assert threading.current_thread() is threading.main_thread()
    fn = Somewhere()
    step = zf.donate(zf.shard(fn, stage=stage))
    other = zf.shard(Somewhere(), stage=stage)
    expected = other.unplace(other(other.place(start("TrainState")), batch(0))[0])
    state = step.place(start("TrainState"))
    fn.happens[place] = ctrl_c
    interrupted = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        step(state, batch(0))
    except KeyboardInterrupt:
        interrupted = True
    return interrupted, digest(step.unplace(state)) == digest(expected)


def test_ranks_that_are_interrupted_in_one_step_all_hold_the_new_state() -> None:
    assert zf.launch(interrupted_rank, "after the update", nprocs=2) == [[(True, True)] * 2] * 2
