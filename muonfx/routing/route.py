"""`Route`: the label of one parameter, the reason for it, and the matrices that the parameter holds."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from muonfx.transforms.matrices import MatrixView

Label: TypeAlias = str | None
"""The group of a parameter, such as "muon"; None if no transform updates it."""

NO_REASON = "given"
"""The reason for a label that the user set, not a rule."""


class Route(NamedTuple):
    """The group of one parameter (its label), the reason, and how the parameter divides into matrices (its view).

    `Labels` contain a route for each parameter.

    >>> Route("muon", "rule 1", MatrixView("in out -> out in")).view
    MatrixView('in out -> out in')
    """

    label: Label
    """The group of the parameter, such as "muon"; None if no transform updates the parameter."""
    reason: str = NO_REASON
    """The reason for the label, as text, such as "frozen"; for fused matrices also a note that names them."""
    view: MatrixView = MatrixView()
    """How the parameter divides into matrices; by default it is one matrix stored (out, in)."""
    shape: tuple[int, ...] | None = None
    """The shape for which the label was chosen. If a tensor has more dims later, as stacked weights of several models
    have, and its transform would flatten them, `partition` raises an error."""
    suggested: str | None = None
    """The pattern to suggest in a warning, if names or widths suggest several matrices in an unknown layer. It is not
    used. If the sizes of the parts are unknown, it has "<rows>" in their places."""
