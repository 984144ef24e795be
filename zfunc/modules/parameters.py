"""The parameters of a functionalized module: held until a step places them, looked for afterwards.

What a step has placed is a copy. If the module held its parameters on, every rank at stage 3 would
keep the full ones beside its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from zfunc.errors import PlacementError
from zfunc.modules.units import Anatomy
from zfunc.trees.nodes import Tree, leaves_in
from zfunc.trees.origins import Origin

__all__ = ["Parameters"]


class Parameters(Origin):
    """What ``Functional.params`` is made of.

    Args:
        name: of the module, for messages.
        anatomy: how its parameters make a tree.
        given: the module's own, by name.
    """

    def __init__(self, name: str, anatomy: Anatomy, given: Mapping[str, nn.Parameter]) -> None:
        self.name, self.anatomy = name, anatomy
        named = {key: p.detach() for key, p in given.items()}
        self._tree: Tree | None = anatomy.tree(named)
        # Somebody may hold the module, or parameters of it, or the tree and its leaves.
        self._known = {key: (TensorWeakRef(x), TensorWeakRef(given[key]))
                       for key, x in named.items()}  # fmt: skip
        super().__init__(named.values())

    def tree(self) -> Tree:
        """The tree, as long as somebody holds its leaves.

        Raises:
            PlacementError: a step has placed them, and nobody does; says how to get them.
        """
        if (held := self._tree) is not None:
            return held
        found = {key: _alive(refs) for key, refs in self._known.items()}
        lost = [key for key, x in found.items() if x is None]
        if lost or not found:
            some = f" ({', '.join(lost[:3])}{', ...' * (len(lost) > 3)})" if lost else ""
            raise PlacementError(
                f"the parameters of {self.name}{some} are no longer in memory: a step has placed "
                "them, and nobody holds the full ones. The placed state has them: "
                "step.unplace(state).params. To place them once more, keep the module, or "
                "`params = model.params`, or functionalize the module anew."
            )
        return self.anatomy.tree({key: x for key, x in found.items() if x is not None})

    def let_go(self) -> None:
        """A step has placed them."""
        self._tree = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        tree = self._tree
        super().__init__(() if tree is None else leaves_in(tree))

    def __getstate__(self) -> dict[str, Any]:
        try:
            tree = self.tree()
        except PlacementError:
            tree = None
        return {"name": self.name, "anatomy": self.anatomy, "_tree": tree, "_known": {}}


def _alive(refs: tuple[TensorWeakRef, TensorWeakRef]) -> Tensor | None:
    leaf, parameter = (ref() for ref in refs)
    if leaf is not None:
        return leaf
    return None if parameter is None else parameter.detach()
