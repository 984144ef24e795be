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


# Of each: tokens of a sequence, sequences of a microbatch, microbatches.
ROWS = {
    "h100_80gb": {("2048", "6", "1"), ("8192", "8", "2"), ("32768", "2", "2")},
    "a100_80gb": {("2048", "6", "2"), ("8192", "8", "2"), ("32768", "2", "2")},
}


def is_tuning(row: Mapping[str, str]) -> bool:
    """Whether constants were tuned on a row: MPT-7B on one node, three lengths, two devices."""
    columns = ("Model", "# GPUs", "Precision", "MP Mode", "Sharding Strategy")
    where = tuple(row[name] for name in columns)
    shape = row["SeqLen (T)"], row["MicroBatchSize"], row["GradAccum"]
    known = ("7b", "8", "amp_bf16", "DEFAULT", "FULL_SHARD")
    return where == known and shape in ROWS.get(row["GPU"], ())
