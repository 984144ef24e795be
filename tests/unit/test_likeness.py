"""Functions that are written alike mean the same; whatever makes a difference is seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zfunc.huggingface.likeness import alike, genuine, same_forward, shadowed, specimen


def half(x: Any) -> Any:
    return x * 0.5


class Norm(nn.Module):
    """As Hugging Face writes them."""

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Said of it."""
        return half(x * torch.rsqrt(self._scale(x) + self.eps))


def written(text: str, **names: Any) -> Any:
    """What a text defines last, in globals of its own."""
    space: dict[str, Any] = {"torch": torch, "nn": nn, "functools": functools, **names}
    exec(text, space)
    return list(space.values())[-1]


NORM = """
import torch

def half(x):
    return x * 0.5

class Other(nn.Module):
    def _scale(self, x):
        return x.pow(2).mean(-1, keepdim=True)

    def forward(self, hidden):
        return half(hidden * torch.rsqrt(self._scale(hidden) + self.eps))
"""


def test_names_and_texts_make_no_difference():
    assert same_forward(written(NORM), Norm)
    assert same_forward(written(NORM.replace("return half", "# so\n        return half")), Norm)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.5", "0.25"),  # in a function it calls
        ("pow(2)", "pow(2.0)"),  # an equal number, of another type
        ("mean", "sum"),  # in a method it calls
        ("-1, keepdim", "-1, keepdims"),
        ("rsqrt", "sqrt"),
        ("self.eps", "self.epsilon"),
        ("+ self", "- self"),
        ("(self, hidden)", "(self, hidden, more=0)"),
        ("    def forward", "    @functools.lru_cache\n    def forward"),
        ("    def forward", "    def __getattr__(self, name): return 1\n    def forward"),
        ("    def forward", "    eps = 3\n    def forward"),
        (
            "    def forward",
            "    def __call__(self, x): return self.forward(x) * 2\n    def forward",
        ),
        ("    def _scale", "    @staticmethod\n    def _scale"),
    ],
)
def test_what_makes_a_difference(old: str, new: str):
    assert old in NORM and not same_forward(written(NORM.replace(old, new)), Norm)


def test_inheriting_is_no_difference_and_overriding_is():
    inherits = type("Inherits", (Norm,), {})
    overrides = type("Overrides", (Norm,), {"_scale": lambda self, x: x})
    replaced = type("Replaced", (Norm,), {"eps": property(lambda self: 1.0)})
    assert same_forward(inherits, Norm)
    assert not same_forward(overrides, Norm) and not same_forward(replaced, Norm)


def adder(n: int) -> Callable[[int], int]:
    return lambda x: x + n


@pytest.mark.parametrize("text", [
    "def f(x): return [y + 2 for y in x]",
    "async def f(x): return [y + 1 for y in x]",
    "def f(*x): return [y + 1 for y in x]",
    "def f(x=1): return [y + 1 for y in x]",
    "def f(x): return {y + 1 for y in x}",
])  # fmt: skip
def test_functions_that_differ(text: str):
    first = written("def f(x): return [y + 1 for y in x]")
    assert alike(first, written("def g(a): return [b + 1 for b in a]"))
    assert not alike(first, written(text))


def test_what_a_closure_holds_counts():
    assert alike(adder(1), adder(1)) and not alike(adder(1), adder(2))
    assert not alike(adder(1), adder(True)) and not alike(adder([1]), adder([1]))


def test_what_cannot_be_read_is_not_alike():
    assert alike(len, len) and not alike(len, max) and not alike(3, half)


def test_where_exceptions_are_caught_counts():
    """It is in none of the instructions."""
    text = "def f(x):\n try: x()\n except KeyError: return 1\n else: return 2"
    other = "def f(x):\n try:\n  x()\n  return 2\n except KeyError: return 1"
    assert alike(written(text), written(text)) and not alike(written(text), written(other))


def test_attributes_of_an_instance_in_the_place_of_methods():
    norm = Norm()
    assert not shadowed(norm)
    norm._scale = torch.abs
    assert shadowed(norm)


def test_functions_that_call_themselves():
    text = "def f(n): return 1 if n < {} else n * f(n - 1)"
    assert alike(written(text.format(2)), written(text.format(2)))
    assert not alike(written(text.format(2)), written(text.format(1)))


def test_decorators_count():
    plain, quiet = "def f(x): return x * 2", "@torch.no_grad()\ndef f(x): return x * 2"
    assert alike(written(quiet), written(quiet)) and not alike(written(plain), written(quiet))
    assert not alike(written(quiet), written("@torch.no_grad()\ndef f(x): return x * 3"))
    for other in ("enable_grad()", "set_grad_enabled(False)", "set_grad_enabled(True)"):
        also = quiet.replace("no_grad()", other)
        assert alike(written(also), written(also)) and not alike(written(quiet), written(also))
    known = quiet.replace("no_grad()", "set_grad_enabled(True)")
    assert not alike(written(known), written(known.replace("True", "False")))


def test_specimens(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama

    homes = (f"{modeling_gemma.__name__}.", f"{modeling_llama.__name__}.")
    assert specimen(f"{homes[0]}GemmaRMSNorm") is modeling_gemma.GemmaRMSNorm
    assert specimen(f"{homes[1]}rotate_half") is modeling_llama.rotate_half
    for path in (f"{homes[0]}Gemma9RMSNorm", "transformers.models.gemma9.modeling_gemma9.Gemma9"):
        assert specimen(path) is None  # of another version
    monkeypatch.setattr(modeling_gemma.GemmaRMSNorm, "_norm", lambda self, x: x)
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert specimen(f"{homes[0]}GemmaRMSNorm") is specimen(f"{homes[1]}rotate_half") is None
    assert specimen(f"{homes[1]}apply_rotary_pos_emb") is None  # it calls the other one
    monkeypatch.setattr(modeling_llama, "rotate_half", modeling_gemma.rotate_half)
    assert specimen(f"{homes[1]}apply_rotary_pos_emb") is None


def test_what_is_put_around_a_function_has_its_name(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers", reason="the `hf` extra is not installed")
    from transformers.models.llama import modeling_llama

    def doubled(method: Any) -> Any:
        return functools.wraps(method)(lambda *args: method(*args) * 2)

    path = f"{modeling_llama.__name__}.LlamaRMSNorm"
    norm, scaled = modeling_llama.LlamaRMSNorm(3), nn.LayerNorm(3)
    assert genuine(norm) == path and genuine(scaled) == "torch.nn.modules.normalization.LayerNorm"
    for part in (norm, scaled):
        monkeypatch.setattr(type(part), "forward", doubled(type(part).forward))
        assert genuine(part) == ""
    assert specimen(path) is None
