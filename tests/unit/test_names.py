"""What ``zf.`` offers: the same names to a program, to a shell, and to a type checker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mypy.api
import pytest

import zfunc as zf
from zfunc import transforms

ROOT = Path(__file__).resolve().parents[2]


def test_every_transform_is_offered() -> None:
    later = sorted(name for name, home in zf._LATER.items() if home == "transforms")
    assert later == sorted(transforms.__all__)
    extra = {"hf"}  # which a star import must not ask for
    assert {*zf._LATER, *zf._ROOMS} - extra <= {*zf.__all__}
    assert len(set(zf.__all__)) == len(zf.__all__)


def test_every_name_is_there_and_is_completed() -> None:
    for name in zf.__all__:
        assert hasattr(zf, name), name
    assert {*zf.__all__} <= {*dir(zf)}
    assert {*zf.__all__} <= {*zf.__dir__()}  # also those that nobody has used yet
    assert {*zf.quant.__all__} <= {*zf.quant.__dir__()}
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        zf.shards  # type: ignore[attr-defined]  # noqa: B018


PROBE = """
from typing import Any
import zfunc as zf
from zfunc.transforms import donate

def fn(state: Any, batch: Any) -> Any: ...

{names}
reveal_type(zf.shard(fn, stage=3))
reveal_type(zf.remat())
reveal_type(zf.donate()(zf.donate(fn)))
reveal_type(donate(fn))
reveal_type(zf.optim.adamw(1e-3))
zf.shard(fn, stages=3)
zf.shards
"""


NAMES = [*zf.__all__, *(f"quant.{name}" for name in zf.quant.__all__)]


def test_a_type_checker_knows_every_name(tmp_path: Path) -> None:
    names = "\n".join(f"reveal_type(zf.{name})" for name in NAMES)
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE.format(names=names))
    out, err, _ = mypy.api.run(["--config-file", str(ROOT / "pyproject.toml"), str(probe)])
    assert not err, err
    # By name: what mypy remembers of the same text it tells with the path of that time.
    lines = [line for line in out.splitlines() if "probe.py:" in line]
    revealed = [found[1] for line in lines if (found := re.search(r'type is "(.*)"', line))]
    named, calls = revealed[: len(NAMES)], revealed[len(NAMES) :]
    assert len(named) == len(NAMES), out
    assert [name for name, kind in zip(NAMES, named, strict=True) if kind == "Any"] == []
    step, wrap = (
        "zfunc.engine.step.Step",
        "def (def (*Any, **Any) -> Any) -> zfunc.engine.step.Step",
    )
    assert calls == [step, wrap, step, step, "zfunc.optim.base.GradientTransformation"]
    errors = [line for line in lines if ": error:" in line]
    last = len(probe.read_text().splitlines())
    assert {int(line.split("probe.py:")[1].split(":")[0]) for line in errors} == {last - 1, last}
    assert any('"stages"' in line for line in errors)
    assert any('"shards"' in line for line in errors)


def test_pyright_knows_every_name(tmp_path: Path) -> None:
    """What editors complete and check by; mypy and pyright follow lazy names in their own ways."""
    names = "\n".join(f"reveal_type(zf.{name})" for name in NAMES)
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE.format(names=names))
    where = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(where))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(tmp_path)]
    ran = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, timeout=250
    )
    found = json.loads(ran.stdout)["generalDiagnostics"]
    lines = probe.read_text().splitlines()
    first = lines.index(names.splitlines()[0])
    revealed = {
        row["range"]["start"]["line"] - first: re.sub(r'Type of ".*?" is "(.*)"$', r"\1", text)
        for row in found
        if row["severity"] == "information" and (text := row["message"]).startswith("Type of")
    }
    kinds = [revealed[i] for i in range(len(NAMES))]
    unknown = {"Any", "Unknown"}
    assert [name for name, kind in zip(NAMES, kinds, strict=True) if kind in unknown] == []
    calls = [revealed[i] for i in range(len(NAMES), len(NAMES) + 5)]
    assert [calls[0], *calls[2:]] == ["Step", "Step", "Step", "GradientTransformation"]
    assert calls[1].endswith("-> Step")
    wrong = [row for row in found if row["severity"] == "error"]
    assert [row["range"]["start"]["line"] for row in wrong] == [len(lines) - 2, len(lines) - 1]
    assert "shards" in wrong[1]["message"]
