"""Detection of parameters that carry the autograd graph of all earlier steps."""

from __future__ import annotations

import warnings

import torch

from muonfx import tree
from muonfx.tree import PyTree
from muonfx.tree.tracing import functorch_is_active

__all__ = ["carries_a_graph", "warn_of_growing_graphs"]


def carries_a_graph(params: PyTree, others: PyTree = None) -> bool:
    """Return True if a parameter is the result of recorded operations, or another tensor requires grad."""
    if not torch.is_grad_enabled() or functorch_is_active():
        return False
    return any(leaf.grad_fn is not None for leaf in tree.tensors(params)) or any(
        leaf.requires_grad for leaf in tree.tensors(others)
    )


def warn_of_growing_graphs(what: str, params: PyTree) -> None:
    """Warn that parameters were not detached and keep the graphs of all steps; ``what`` names the caller."""
    named = zip(tree.names(params), tree.leaves(params), strict=True)
    name = next(name for name, leaf in named if leaf is not None and leaf.grad_fn is not None)
    warnings.warn(
        f"{what}: the parameters, such as {name!r}, carry the graph of the steps before, and the gradients carry none: "
        "it grows with every step and takes memory. If nothing is differentiated through the steps, detach the "
        "parameters once, params = {n: p.detach() for n, p in model.named_parameters()}, or step under torch.no_grad()",
        UserWarning,
        stacklevel=3,
    )
