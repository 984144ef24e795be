"""Follow random generators while nothing is drawn.

A recording draws nothing, and no mode sees ``torch.manual_seed``, ``fork_rng`` or
``generator.set_state``. So after each draw its generator is put into a *mark*: a state of
its own, which no seed leads to. At the next draw the generator holds that mark (its stream
went on), an older mark (somebody put that state back), or a state that we did not write
(somebody seeded it, and here it is). All three can be replayed. A mark keeps
``initial_seed()``, and at the end every generator is put back as it was.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, UntypedStorage

from zfunc.initialisation.tape import Draw, MemoryCell

__all__ = ["GeneratorStates"]

_MARKS = itertools.count(0x5EED0F2A)


class GeneratorStates:
    """Follows random generators while nothing is drawn, by marking their states."""

    def __init__(self) -> None:
        self.states: dict[MemoryCell, Tensor] = {}  # those computed so far
        self.starts: list[MemoryCell] = []  # of the global generators
        self.rooted: set[MemoryCell] = set()  # states that go back to a start
        self._originals: dict[torch.Generator, Tensor] = {}
        self._marks: dict[bytes, MemoryCell] = {}

    def __enter__(self) -> GeneratorStates:
        if torch.cuda.is_available():
            torch.cuda.init()  # there are no generators before
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            start = MemoryCell(start=generator)
            self.starts.append(start)
            self.rooted.add(start)
            self.states[start] = self._originals[generator] = generator.get_state()
            self._mark(generator, start)
        return self

    def __exit__(self, *error: object) -> None:
        for generator, state in self._originals.items():
            generator.set_state(state)

    @property
    def pinned(self) -> dict[torch.Generator, Tensor]:
        """The states that the global generators started in."""
        return {cell.start: self._originals[cell.start] for cell in self.starts if cell.start}

    def draw(self, generator: torch.Generator | None, device: torch.device) -> Draw:
        """A generator (None: the device's) takes one turn, from its state to a new one."""
        generator = generator or _default_generator(device)
        self._originals.setdefault(generator, generator.get_state())
        draw = Draw(generator, self._state(generator), MemoryCell())
        if draw.before in self.rooted:
            self.rooted.add(draw.after)
        self._mark(generator, draw.after)
        return draw

    def ends(self) -> list[tuple[torch.Generator, MemoryCell]]:
        """The state that make_state left each generator in."""
        return [(generator, self._state(generator)) for generator in self._originals]

    def marked(self, storage: UntypedStorage) -> bool:
        """Whether these bytes are a mark, and so no state of a generator at all."""
        content = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return storage.nbytes() < 10_000 and _bytes(content.set_(storage).cpu()) in self._marks

    def _state(self, generator: torch.Generator) -> MemoryCell:
        state = generator.get_state()
        return self._marks.get(_bytes(state)) or MemoryCell(constant=state)

    def _mark(self, generator: torch.Generator, cell: MemoryCell) -> None:
        state = generator.get_state()
        if state.numel() == 16:  # CUDA's: a seed and an offset, which is a multiple of 4
            state.view(torch.int64)[1] = 4 * next(_MARKS)
        else:  # the seed, which stays, and then the stream
            other = torch.Generator(generator.device).manual_seed(next(_MARKS))
            state[8:] = other.get_state()[8:]
        generator.set_state(state)
        self._marks[_bytes(generator.get_state())] = cell


def _bytes(state: Tensor) -> bytes:
    return bytes(state.numpy())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
