"""Choose a transform for each parameter by shape, name and module type, and report the reasons.

A label is the name of a group of parameters, such as "muon"; all parameters of a group get the same transform.

- A `Predicate` is a condition on one parameter, such as ``ndim(2) & ~path("*head*")``.
- `labels` applies your own rules in order. `default_labels` applies your rules, then the rules of Muon. Both return
  `Labels`, an immutable mapping from parameter name to label, which also records the rule that matched.
- `Labels` include a `MatrixView`, which describes how a parameter divides into matrices, for each stacked, fused or
  transposed weight.
- `describe` returns the labels and their reasons as a table.
- `muonfx.partition` applies a transform to each label's parameters; `muonfx.masked` applies one to a subset.

>>> from torch import nn
>>> model = nn.Sequential(
...     nn.Embedding(16, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
... )
>>> describe(default_labels(model, [(path("2.*"), "sgd")]), model)
parameter  shape   label  rule
0.weight   16 x 8  adamw  embedding (module type Embedding)
1.weight   8 x 8   muon   hidden matrix (2-D)
2.weight   8 x 8   sgd    user rule 1: path('2.*')
<BLANKLINE>
label  tensors  elements   share
adamw        1       128   50.0%
muon         1        64   25.0%
sgd          1        64   25.0%
total        3       256  100.0%
"""

from muonfx.routing.defaults import default_labels, default_labels_by_name
from muonfx.routing.params import ParamInfo
from muonfx.routing.predicates import Predicate, module_type, ndim, path, where
from muonfx.routing.report import describe
from muonfx.routing.route import Route
from muonfx.routing.rules import Labels, labels

__all__ = [
    "Labels",
    "ParamInfo",
    "Predicate",
    "Route",
    "default_labels",
    "default_labels_by_name",
    "describe",
    "labels",
    "module_type",
    "ndim",
    "path",
    "where",
]


def __dir__() -> list[str]:
    return sorted(__all__)
