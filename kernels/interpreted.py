"""Every Triton kernel beside its twin in Triton's interpreter: what a process of its own runs.

TRITON_INTERPRET=1 python -m zfunc.kernels.interpreted
"""

from __future__ import annotations

import json
from dataclasses import asdict

from zfunc.kernels.interpreter_triton import teach
from zfunc.kernels.verification import verify


def main() -> None:
    teach()
    for verdict in verify(device="cpu"):
        print(json.dumps(asdict(verdict)), flush=True)


if __name__ == "__main__":
    main()
