from dataclasses import dataclass
from typing import NamedTuple
class Action(NamedTuple):
    kind: str
    microbatch: int
    chunk: int
@dataclass(frozen=True)
class Schedule:
    rank_of: tuple
    microbatches: int
    actions: tuple
