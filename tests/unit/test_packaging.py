"""What is installed is `zfunc` and nothing else, whole, and it works away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kernels", "optim", "quant", "transforms")


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> set[str]:
    """Every module as the wheel should hold it, the rooms in their place under `zfunc`."""
    folders = [("zfunc", ROOT / "zfunc"), *((f"zfunc/{room}", ROOT / room) for room in ROOMS)]
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in folders
        for path in folder.rglob("*.py")
    }


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **env}, timeout=240
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, from a copy: a stale build/ folder must not leak into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("zfunc", *ROOMS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source / name)
    # In isolated mode (-I) neither the working folder nor PYTHONPATH can lend the build anything.
    run(sys.executable, "-I", "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_rooms_are_real_folders_with_links_to_them():
    for room in ROOMS:
        link = ROOT / "zfunc" / room
        assert (ROOT / room).is_dir()
        assert not (ROOT / room).is_symlink()
        assert link.is_symlink()
        assert os.readlink(link) == f"../{room}"


def test_the_map_in_pyproject_names_every_package():
    listed = settings()["tool"]["setuptools"]
    found = {Path(module).parent.as_posix().replace("/", ".") for module in sources()}
    assert set(listed["packages"]) == found
    assert set(listed["package-dir"]) == found


def test_zfunc_is_the_only_top_level_name(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"zfunc"}
    assert wheel.name.startswith("zfunc_torch-")


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == sources()
    assert "zfunc/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    program = (
        "import importlib, sys\n"
        "import zfunc\n"
        f"for room in {ROOMS!r}: importlib.import_module('zfunc.' + room)\n"
        "print('\\n'.join(m.__file__ for n, m in sys.modules.items()\n"
        "      if n.split('.')[0] == 'zfunc'))\n"
        f"assert not set({ROOMS!r}) & set(sys.modules), 'a room was imported by its bare name'\n"
    )
    # -P keeps the working folder out of sys.path; PYTHONPATH goes before an editable install.
    out = run(sys.executable, "-P", "-c", program, cwd=tmp_path, PYTHONPATH=str(site))
    files = out.split()
    assert len(files) > len(ROOMS)
    assert all(Path(file).is_relative_to(site) for file in files), files


def test_the_console_script_points_at_a_function():
    module, function = settings()["project"]["scripts"]["zfunc"].split(":")
    code = f"import {module} as m; assert callable(m.{function})"
    run(sys.executable, "-c", code, cwd=ROOT)


def test_llvmlite_is_an_extra_that_developers_and_readers_get():
    project = settings()["project"]
    assert not any("llvmlite" in asked for asked in project["dependencies"])
    assert any("llvmlite" in asked for asked in project["optional-dependencies"]["cpu"])
    assert any("zfunc-torch[cpu," in asked for asked in project["optional-dependencies"]["dev"])
    assert 'pip install ".[cpu]"' in (ROOT / "README.md").read_text()


def test_the_constraints_pin_what_pyproject_asks_for():
    from packaging.requirements import Requirement

    project = settings()["project"]
    text = (ROOT / "constraints.txt").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    pins = {pin.name: pin for pin in map(Requirement, filter(None, lines))}
    assert all(str(pin.specifier).startswith("==") for pin in pins.values())
    extras = [text for group in project["optional-dependencies"].values() for text in group]
    for asked in map(Requirement, [*project["dependencies"], *extras]):
        if asked.name == project["name"]:
            continue
        assert asked.name in pins, f"{asked.name} is not pinned in constraints.txt"
        (exact,) = pins[asked.name].specifier
        assert exact.version in asked.specifier, f"{asked} excludes the tested {exact.version}"
