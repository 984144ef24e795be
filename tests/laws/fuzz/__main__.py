"""One case again: ``python -m tests.laws.fuzz NUMBER [--shrink]``; or many: ``FIRST LAST``."""

from __future__ import annotations

import sys

from tests.laws.fuzz.cases import drawn
from tests.laws.fuzz.plain import check
from tests.laws.fuzz.shrinking import failure, shrunk


def main() -> int:
    shrink = "--shrink" in sys.argv
    numbers = [int(x) for x in sys.argv[1:] if not x.startswith("-")]
    if len(numbers) == 1 and not shrink:
        print(drawn(numbers[0]))
        check(drawn(numbers[0]))
        return 0
    wrong = 0
    for number in range(numbers[0], numbers[-1] + 1):
        case = drawn(number)
        error = failure(case)
        if error is not None:
            wrong += 1
            print(f"{case}\n    {error}", flush=True)
            if shrink:
                small, why = shrunk(case, error)
                print(f"  = {small}\n    {why}", flush=True)
    print(f"{wrong} of {numbers[-1] + 1 - numbers[0]} cases fail")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
