"""Low-bit weights in large pages: the kernel's own count of them, and the same values."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from zfunc.kernels import panels
from zfunc.kernels.llvm import Host, host
from zfunc.quant import int4_products, int8_products, large_pages, panel_products
from zfunc.quant.grids import Format
from zfunc.quant.qtensor import QTensor

NONE = Host("", False, "another CPU")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_large_pages = pytest.mark.skipif(
    not SETTING.exists()
    or "[never]" in SETTING.read_text()
    or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 1),
    reason="this system has no transparent large pages, or does not make them when asked",
)


def in_large_pages(address: int) -> int:
    """Bytes in large pages, as Linux counts them in the mapping that an address is in."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found = int(line.split()[1]) * 1024
    return found


@needs_large_pages
def test_memory_that_is_in_use_moves_and_keeps_its_values() -> None:
    x = torch.arange(3 << 20)  # 24 MiB
    middle = x.data_ptr() + x.nbytes // 2
    assert large_pages.collapse(x.data_ptr(), x.nbytes)
    assert in_large_pages(middle) >= x.nbytes - (4 << 20)
    assert torch.equal(x, torch.arange(3 << 20))


def test_what_is_within_one_page_stays() -> None:
    x = torch.arange(8)
    assert not large_pages.collapse(x.data_ptr(), x.nbytes)
    assert not large_pages.collapse(x.data_ptr(), 0)


@needs_large_pages
@pytest.mark.parametrize(
    ("form", "route"),
    [
        pytest.param(
            Format(4, 64),
            panel_products,
            marks=pytest.mark.skipif(not host().isa, reason=host().why),
        ),
        pytest.param(
            Format(8, None),
            int8_products,
            marks=pytest.mark.skipif(not int8_products.exact(), reason="no exact int8 product"),
        ),
        pytest.param(
            Format(4, 128),
            int4_products,
            marks=pytest.mark.skipif(not int4_products.works(), reason="no 4-bit kernel"),
        ),
    ],
    ids=["panels", "int8", "int4"],
)
def test_products_ask_for_them(
    form: Format, route: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all of a weight's codes; products and codes are those of a weight that stays."""
    w, x = torch.randn(4096, 2048), torch.randn(1, 2048)
    seen: list[int] = []

    def collapse(address: int, length: int) -> bool:
        seen.append(length)
        return real(address, length)

    monkeypatch.setattr(panels, "host", host if route is panel_products else lambda: NONE)
    real = large_pages.collapse
    q, stays = QTensor.quantize(w, form), QTensor.quantize(w, form)
    with monkeypatch.context() as patch:
        patch.setattr(route, "into_large_pages", lambda codes: codes)
        expected = F.linear(x, stays)
    codes = q.codes.clone()
    monkeypatch.setattr(large_pages, "collapse", collapse)
    assert torch.equal(F.linear(x, q), expected) and torch.equal(q.codes, codes)
    assert sum(seen) >= w.numel() * form.bits // 8
