"""Checks of a module before it is functionalized: what would be lost, or would change the state."""

from __future__ import annotations

from torch import nn

from zfunc.errors import PlacementError

__all__ = ["check_module"]


def check_module(module: nn.Module) -> None:
    """Raise ``PlacementError`` if a part of the module cannot be kept as it is.

    The module's code is copied and run on other tensors than its own parameters, and often no
    other process ever sees these.
    """
    for name, part in module.named_modules():
        where = f"layer {name}" if name else "the module"
        if hasattr(part, "_orig_mod"):
            raise PlacementError(
                f"{where} is compiled (torch.compile gave a {type(part).__name__}), which its copy "
                "would not be. Give functionalize() the module itself (._orig_mod), and let it "
                "compile the layers: functionalize(module, compile=True)."
            )
        if part._compiled_call_impl is not None:
            raise PlacementError(
                f"{where} ({type(part).__name__}) was compiled by its compile(), which its copy "
                "would not be. Leave that out, and let functionalize() compile the layers: "
                "functionalize(module, compile=True)."
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise PlacementError(
                f"{where} has max_norm={part.max_norm:g}: its forward writes to {name or 'its'}"
                f"{'.' if name else ' '}weight, and so to the state that it is given. Set max_norm "
                "to None, and scale the rows in the loss, or the new parameters after the update."
            )
    for name, p in module.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(p, kind, None):
                registered = "register" + kind.removesuffix("s").replace("_backward", "")
                found = getattr(next(iter(hooks.values())), "__qualname__", "a function")
                raise PlacementError(
                    f"parameter {name} has a hook ({found}, by {registered}), which would never "
                    "run: gradients are those of other tensors. Remove it, and change gradients "
                    "between zf.value_and_grad and tx.update, or by a GradientTransformation in "
                    "optim.chain, which know them by their paths."
                )
