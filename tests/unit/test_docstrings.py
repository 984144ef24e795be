"""Every example in a docstring runs, module by module, each imported by its dotted name."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import zfunc

MODULES = sorted(
    {"zfunc"} | {found.name for found in pkgutil.walk_packages(zfunc.__path__, "zfunc.")}
)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_the_examples_of(name: str):
    # By dotted name, never by path: a file reached as `transforms.x` too would be a second module.
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)
