"""Peaks of a process's memory: quantising holds one weight in full, decoding no more per token."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.unit.peaks import measured, needs_peaks

pytestmark = needs_peaks

PLACING = """
with torch.device("meta"):
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)])
model = zf.functionalize(net)  # 16 MiB a layer, 192 MiB in all
predict = zf.quantize(model.apply, bits=4, group_size=128)
before = held()
params = predict.place(sys.argv[1])
print(mark("VmHWM") - before, zf.tree.size_bytes(params))
"""
DECODING = """
from zfunc.language import gpt
from zfunc.language.gpt_decoding import GPTDecoder
shape = gpt.GPTConfig(vocab=64, width=256, depth=4, heads=4)
params, peaks = gpt.init(shape, zf.random.key(0)), []
def seen(column):
    if len(peaks) == 0 or len(peaks) == 32: held()
    peaks.append(mark("VmHWM"))
ids = torch.zeros(8, 4, dtype=torch.int64)
zf.generate(GPTDecoder(shape), params, ids, max_new_tokens=160, stream=seen)
# What is held and worked with after 32 tokens, and after 160; a cache that grew by copies, or
# kept what it was before, would add 8 texts * 4 blocks * 2 * 1 KiB for each token.
print(peaks[31], peaks[-1])
"""


def test_placing_files_holds_one_weight_in_full(tmp_path: Path) -> None:
    for i in range(12):
        save_file({f"{i}.weight": torch.ones(2048, 2048)}, tmp_path / f"{i}.safetensors")
    peak, low = measured(PLACING, str(tmp_path))
    weight = 2048 * 2048 * 4
    # The weight as read, the same in steps of its grid, a quarter in codes before they are packed;
    # the pages of torch's own code that this takes come to half a weight.
    assert peak < low + 3.5 * weight < 6 * weight


def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    early, late = measured(DECODING)
    assert late - early < 2_000_000
