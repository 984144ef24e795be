"""The pages as pages: links lead somewhere, nothing is too long, everything is on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import zfunc as zf
from tests.pictures import FOLDER, PICTURES
from zfunc import transforms

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^(`{3,})\w*\n.*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
PUBLIC = re.compile(r"(?<![\w./])(zf\.tree|zf\.random|zf|optim)\.(\w+)")
REPLACED = "`fully_shard`:**\n\n    step = zf.shard("


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """A page without its code and its tables."""
    lines = FENCE.sub("", text).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("|", "    ")))


def anchors(page: Path) -> set[str]:
    """What headings can be linked to by."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    found = {re.sub(r"[-\s]+", "-", head) for head in words}
    return found | set(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))


def links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text())
    return [link for link in LINK.findall(text) if not link.startswith("http")]


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_short(page: Path) -> None:
    text = page.read_text()
    assert len(prose(text).split()) <= 1_500
    assert len(text.split()) <= 1_900


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def on_the_site() -> list[str]:
    def pages(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        inner = part.values() if isinstance(part, dict) else part
        return [page for each in inner for page in pages(each)]  # type: ignore[attr-defined]

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return pages(settings["nav"])


def test_every_page_is_on_the_site_once() -> None:
    assert sorted(on_the_site()) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def within(clicks: int, page: Path) -> set[Path]:
    """The pages that are so many links from one."""
    found = {page}
    for _ in range(clicks):
        found |= {
            (start.parent / link.partition("#")[0]).resolve()
            for start in found
            if start.suffix == ".md"
            for link in links(start)
        }
    return found


def test_the_line_that_replaces_fully_shard_is_near() -> None:
    near = within(2, DOCS / "index.md")
    assert any(REPLACED in page.read_text() for page in near if page.suffix == ".md")


def test_every_transform_has_a_page() -> None:
    front = (DOCS / "transforms" / "index.md").read_text()
    for transform in [*transforms.__all__, "captured"]:
        link = re.search(rf"\[`{transform}`\]\(([\w./]+)\)", front)
        assert link is not None, transform
        page = (DOCS / "transforms" / link[1]).read_text()
        assert "## Example" in page or transform in ("split", "pipeline", "quantize")
        assert "Edges" in page or transform == "split"


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    texts = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    listed = {x for text in texts for x in re.findall(r"^::: zfunc\.(\S+)$", text, re.MULTILINE)}
    rooms = {"kernels", "optim", "quant", "transforms"}
    errors = {found for found in zf.__all__ if found.endswith("Error")}  # on the page of `errors`
    assert set(zf.__all__) - rooms - errors <= listed
    for room in ("optim", "quant"):
        assert {f"{room}.{found}" for found in getattr(zf, room).__all__} <= listed


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_names_on_a_page_are_public(page: Path) -> None:
    rooms = {"zf": zf, "zf.tree": zf.tree, "zf.random": zf.random, "optim": zf.optim}
    for room, found in PUBLIC.findall(page.read_text()):
        assert hasattr(rooms[room], found), f"{room}.{found}"


def test_paths_of_files_that_pages_name_exist() -> None:
    folders = "benchmarks|examples|kernels|optim|quant|tests|transforms|zfunc"
    for page in PAGES:
        if page.name == "rooms.md":  # which tells where files were before
            continue
        for found in re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text()):
            assert (ROOT / found).exists(), f"{name(page)}: {found}"


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_what_the_script_draws(picture: str) -> None:
    assert (FOLDER / picture).read_text() == PICTURES[picture](), "run `python -m tests.pictures`"
