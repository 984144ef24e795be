"""The constants of ``benchmarks.foresight`` that were tuned, and on which rows.

``python -m benchmarks.foresight --tune`` finds them anew, on these rows alone. They stand for what
the clocks do not know of MPT's software and of a device's power: no device has such properties.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TUNED", "is_tuning"]

# Two for each device: shares of its peak that large products and long attention reach.
TUNED = {
    "h100": {"product": 0.597, "attention": 0.208},
    "a100-80": {"product": 0.759, "attention": 0.367},
}


def is_tuning(row: Mapping[str, str]) -> bool:
    """Whether constants were tuned on a row: MPT-7B on one node, three lengths, two devices."""
    where = (
        row["Model"],
        row["# GPUs"],
        row["Precision"],
        row["MP Mode"],
        row["Sharding Strategy"],
    )
    device, seq = row["GPU"], row["SeqLen (T)"]
    return (
        where == ("7b", "8", "amp_bf16", "DEFAULT", "FULL_SHARD")
        and device in ("h100_80gb", "a100_80gb")
        and seq in ("2048", "8192", "32768")
    )
