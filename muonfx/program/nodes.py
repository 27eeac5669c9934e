"""The nodes of a program: what is done, on which leaves, where its state is and where its numbers are.

A program is a tree of nodes, made from a transform and the names, shapes and dtypes of the leaves alone. An executor
carries it out under any layout and wherever the state lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from muonfx.core import Transform
from muonfx.tree import PyTree
from muonfx.tree.display import Column, Report, Row, Shown, Table

__all__ = [
    "Around",
    "ChainNode",
    "Elementwise",
    "Member",
    "Node",
    "OnPieces",
    "OwnNumbers",
    "Program",
    "Stage",
    "SumOverLeaves",
    "WholeTree",
]


@dataclass(frozen=True)
class OwnNumbers:
    """The numeric arguments of one transform, without those of others that it calls.

    Attributes:
        names: their dotted names among the parts of the whole, in order.
        keys: the same without the labels of the routes on the way, as a torch optimizer calls them.
        short_names: the names that the transform's author gives to some of them, as `muonfx.transform` takes them, with
            dotted names in the place of arguments; several make a tuple.
    """

    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    short_names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, str | tuple[str, ...]])


@dataclass(frozen=True, eq=False)
class Node:
    """A transform that is done in one way.

    Attributes:
        tx: the transform, with all decided that names, shapes and the group of ranks decide.
        names: of the leaves that it works on.
        state: the path of its state in that of the whole program.
        numbers: the dotted name of the transform among the parts of the whole, where its numbers are.
        like: meta tensors of global shapes, in the tree that it gets.
        keeps_numbers: whether ``tx`` has the numbers of the transform that it was lowered from, in the same order; a
            transform that makes others when it is resolved is resolved again at every step.
        label: by which a route chooses it for its leaves; None where nothing has.
        own: the numbers of its transform.
        within: what stands for the transforms that its own calls and runs as a part of itself: to be read, not carried
            out.
        number: by which an executor knows it, as torch.compile cannot hash it.
    """

    kind: ClassVar[str] = ""

    tx: Transform
    names: tuple[str, ...]
    state: tuple[Any, ...]
    numbers: str
    like: PyTree
    keeps_numbers: bool
    label: str | None = field(default=None, kw_only=True)
    own: OwnNumbers = field(default_factory=OwnNumbers, kw_only=True)
    within: tuple[Node, ...] = field(default=(), kw_only=True)
    number: int = field(default_factory=itertools.count().__next__, kw_only=True, repr=False)

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes within it."""
        return ()

    @property
    def called(self) -> tuple[Node, ...]:
        """One node for each transform that its own calls, in order: of a matrix stage, its members."""
        return tuple(one for child in self.children or self.within for one in _one_by_one(child))

    @property
    def title(self) -> str:
        """The transforms that it stands for."""
        return self.tx.name


class Elementwise(Node):
    """Done on any pieces of leaves as they are."""

    kind = "elementwise"


class SumOverLeaves(Node):
    """Done on any pieces of leaves, but for sums over all leaves, which go over all ranks."""

    kind = "sum over leaves"


class OnPieces(Node):
    """Done on this rank's pieces of leaves, with what it asks of other ranks itself."""

    kind = "on pieces"


class WholeTree(Node):
    """A transform of which nothing is known: it gets the whole tree."""

    kind = "whole tree"


@dataclass(frozen=True)
class Member:
    """A transform of a matrix stage, with its name in the chain."""

    name: str
    node: Node


@dataclass(frozen=True, eq=False)
class Stage(Node):
    """Neighbouring transforms that need whole matrices, or leaves, at one place."""

    kind: ClassVar[str] = "matrix stage"

    members: tuple[Member, ...] = ()

    @property
    def title(self) -> str:
        """Its transforms."""
        return ", ".join(member.node.tx.name for member in self.members)


@dataclass(frozen=True, eq=False)
class Around(Node):
    """A transform whose own work is elementwise, or a sum over leaves, and which calls others.

    The executor answers these calls. What a child is given was found by running `init` on placeholders: where a child
    gets some of the leaves only, the node is a route.
    """

    inner: tuple[Node, ...] = ()

    @property
    def children(self) -> tuple[Node, ...]:
        """Those that it calls."""
        return self.inner

    @property
    def is_route(self) -> bool:
        """True if some child gets some of the leaves only."""
        return any(child.names != self.names for child in self.inner)


@dataclass(frozen=True, eq=False)
class ChainNode(Node):
    """A chain: one after another."""

    kind: ClassVar[str] = "chain"

    entries: tuple[tuple[tuple[str, ...], Node], ...] = ()
    """The nodes with the names of the chain's transforms that each stands for: several for a matrix stage."""

    @property
    def children(self) -> tuple[Node, ...]:
        """Its nodes, in order."""
        return tuple(node for _, node in self.entries)


@dataclass(frozen=True, eq=False, repr=False)
class Program(Shown):
    """The nodes that a transform becomes for the leaves of a tree; made by `lower`, printed for a reader.

    Attributes:
        root: the node of the whole transform.

    >>> import torch
    >>> import muonfx as mfx
    >>> program = mfx.program.lower(mfx.chain(mfx.momentum(), mfx.orthogonalize()), {"w": torch.zeros(4, 4)})
    >>> [node.kind for node in program.nodes()]
    ['chain', 'elementwise', 'matrix stage']
    """

    root: Node

    def nodes(self) -> Iterator[Node]:
        """Every node, each before those within it."""
        yield from _within(self.root)

    def transforms(self) -> Iterator[Node]:
        """One node for each transform, each before those that it calls: also where several run as one.

        >>> import torch
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.cautious(mfx.momentum()), mfx.orthogonalize())
        >>> program = mfx.program.lower(tx, {"w": torch.zeros(4, 4)})
        >>> [node.tx.name for node in program.transforms()]
        ['chain', 'cautious', 'momentum', 'orthogonalize']
        """
        for node in _one_by_one(self.root):
            yield from _calls(node)

    def report(self) -> Report:
        """The program as a table: a row for each node, with those within it under it."""
        titles = ("node", "locality", "leaves", "state", "numbers")
        return Report((Table(tuple(map(Column, titles)), (_row(self.root),)),))


def _kind_of(node: Node) -> str:
    return ("route" if node.is_route else "around") if isinstance(node, Around) else node.kind


def _within(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _within(child)


def _one_by_one(node: Node) -> tuple[Node, ...]:
    return tuple(member.node for member in node.members) if isinstance(node, Stage) else (node,)


def _calls(node: Node) -> Iterator[Node]:
    yield node
    for called in node.called:
        yield from _calls(called)


def _row(node: Node) -> Row:
    cells = (
        f"{_kind_of(node)}: {node.title}",
        node.tx.locality.name,
        str(len(node.names)),
        ".".join(map(str, node.state)) or "-",
        node.numbers or "-",
    )
    return Row(cells, tuple(map(_row, node.children)))
