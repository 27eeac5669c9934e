"""`Program`, the form in which a transform is executed: a tree of nodes, one for each transform or group of transforms.

A program is built from a transform and the names, shapes and dtypes of the parameters alone. Each node stores a
transform, the names of the parameters that it updates, the path of its state, and the prefix of its hyperparameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from muonfx.core import Transform
from muonfx.tree import PyTree
from muonfx.tree.display import Report, Row, Shown, Table

__all__ = [
    "Around",
    "ChainNode",
    "Member",
    "Node",
    "OwnNumbers",
    "Program",
    "Stage",
    "WholeTree",
]


@dataclass(frozen=True)
class OwnNumbers:
    """The names of a transform's own hyperparameters, without hyperparameters of the transforms that it calls."""

    names: tuple[str, ...] = ()  # dotted names in the lowered transform, such as "muon.momentum.decay", in order
    keys: tuple[str, ...] = ()  # `names` without labels, such as "momentum.decay": the keys in an optimizer's groups
    # Short keys that the author declares, such as "lr", with the dotted name; a tuple of names for several numbers.
    short_names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, str | tuple[str, ...]])


@dataclass(frozen=True, eq=False)
class Node:
    """One entry of a program: a transform, the names of the parameters that it updates, and how it runs."""

    tx: Transform  # resolved: with all choices that depend on names and shapes made
    names: tuple[str, ...]  # of its leaves
    state: tuple[Any, ...]  # path of its state in the program's state
    numbers: str  # dotted name of the transform in the lowered transform, the prefix of its numbers
    like: PyTree  # meta tensors of global shapes, in the tree that it receives
    # True if `tx` has the numbers of the original transform, in the same order; otherwise new numbers lower it again.
    keeps_numbers: bool
    label: str | None = None  # by which `partition` selects it
    own: OwnNumbers = OwnNumbers()
    kind: str = field(default="elementwise", kw_only=True)  # how it is executed, for reports
    children: tuple[Node, ...] = field(default=(), kw_only=True)  # the nodes that are executed within this node
    # Nodes of the transforms that `tx` calls and runs itself: for reports, never executed.
    within: tuple[Node, ...] = field(default=(), kw_only=True)
    # The key of the node in an executor's caches, because torch.compile cannot hash a node.
    number: int = field(default_factory=itertools.count().__next__, kw_only=True, repr=False)

    @cached_property
    def called(self) -> tuple[Node, ...]:
        """The nodes of the transforms that this node's transform calls, in order, one for each transform."""
        return tuple(one for child in self.children or self.within for one in _one_by_one(child))

    @property
    def title(self) -> str:
        """The name to print: the transform's name, or the comma-separated names of transforms that run together."""
        return ", ".join(one.tx.name for one in _one_by_one(self))


class WholeTree(Node):
    """The node of a transform that needs all parameters in full; every rank gathers sharded tensors for it."""


class Member(NamedTuple):
    """One transform of a matrix stage (transforms that run together on whole matrices), with its name in the chain."""

    name: str
    node: Node


@dataclass(frozen=True, eq=False)
class Stage(Node):
    """A node for a matrix stage: neighbouring transforms of a chain that require whole matrices or leaves.

    If parameters are sharded, each matrix is sent to one rank, which runs all of these transforms on it.
    """

    members: tuple[Member, ...] = ()


class Around(Node):
    """The node of a wrapper (a transform that calls others), such as `accumulate`.

    The wrapper's own work is elementwise or a sum over leaves. Its `children` are the nodes of the called transforms.
    """


@dataclass(frozen=True, eq=False)
class ChainNode(Node):
    """A node for a chain: transforms that run one after another."""

    entries: tuple[tuple[tuple[str, ...], Node], ...] = ()
    """The nodes of the chain in order, each with the names of its members; a matrix stage may have several."""


@dataclass(frozen=True, eq=False, repr=False)
class Program(Shown):
    """The plan by which a transform is executed for given parameters. `lower` returns it; it prints as a table.

    It is a tree of nodes. A node stores a transform, the names of the parameters that it updates, and the kind of
    execution, such as "elementwise". Neighbouring transforms that need whole matrices share a "matrix stage".

    Attributes:
        root: the node of the whole transform.

    >>> import torch
    >>> import muonfx as mfx
    >>> program = mfx.placement.lower(mfx.chain(mfx.momentum(), mfx.orthogonalize()), {"w": torch.zeros(4, 4)})
    >>> [node.kind for node in program.nodes()]
    ['chain', 'elementwise', 'matrix stage']
    """

    root: Node

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of the program: first a node, then the nodes inside it."""
        yield from _within(self.root)

    def transforms(self) -> Iterator[Node]:
        """Yield one node for each transform: first an outer transform, then the transforms that it calls.

        Neighbouring matrix transforms that run together are one node in `nodes`, but one node each in this method.

        >>> import torch
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.cautious(mfx.momentum()), mfx.orthogonalize())
        >>> program = mfx.placement.lower(tx, {"w": torch.zeros(4, 4)})
        >>> [node.tx.name for node in program.transforms()]
        ['chain', 'cautious', 'momentum', 'orthogonalize']
        """
        for node in _one_by_one(self.root):
            yield from _with_calls(node)

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Raise if a transform cannot use one of the extra arguments of a step, such as ``value=loss``."""
        for node in self.transforms() if extras and not torch.compiler.is_compiling() else ():
            if (check := node.tx.declaration.check_extras) is not None:
                check(node.tx, extras)

    def report(self) -> Report:
        """Return a table with one row for each node (a transform, or several that run together).

        A row has the kind of execution, the name, the locality (the part of the tree that one element of an update
        depends on), the number of leaves, the path of the state, and the prefix of the hyperparameters.
        """
        titles = ("node", "locality", "leaves", "state", "numbers")
        return Report((Table(titles, [_row(self.root)]),))


def _within(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _within(child)


def _one_by_one(node: Node) -> tuple[Node, ...]:
    return tuple(member.node for member in node.members) if isinstance(node, Stage) else (node,)


def _with_calls(node: Node) -> Iterator[Node]:
    """Yield a node, and then the nodes of all transforms that its transform calls, directly or not."""
    yield node
    for called in node.called:
        yield from _with_calls(called)


def _row(node: Node) -> Row:
    cells = (
        f"{node.kind}: {node.title}",
        node.tx.locality.name,
        str(len(node.names)),
        ".".join(map(str, node.state)) or "-",
        node.numbers or "-",
    )
    return Row(cells, tuple(map(_row, node.children)))
