"""The nodes of a program: what is done, on which leaves, where its state is and where its numbers are.

A program is a tree of nodes, made from a transform and the names, shapes and dtypes of the leaves alone. An executor
carries it out under any layout and wherever the state lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from muonfx.core import Transform
from muonfx.tree import PyTree

__all__ = ["Around", "Elementwise", "Member", "Node", "Program", "ChainNode", "Stage", "SumOverLeaves", "WholeTree"]


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
        number: by which an executor knows it, as torch.compile cannot hash it.
    """

    kind: ClassVar[str] = ""

    tx: Transform
    names: tuple[str, ...]
    state: tuple[Any, ...]
    numbers: str
    like: PyTree
    keeps_numbers: bool
    number: int = field(default_factory=itertools.count().__next__, kw_only=True, repr=False)

    @property
    def children(self) -> tuple[Node, ...]:
        """The nodes within it."""
        return ()

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


@dataclass(frozen=True, eq=False)
class Program:
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

    def __str__(self) -> str:
        rows = [("node", "locality", "leaves", "state", "numbers")]
        rows += [
            (
                "  " * depth + _kind_of(node) + ": " + node.title,
                node.tx.locality.name,
                str(len(node.names)),
                ".".join(map(str, node.state)) or "-",
                node.numbers or "-",
            )
            for depth, node in _with_depths(self.root, 0)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _kind_of(node: Node) -> str:
    return ("route" if node.is_route else "around") if isinstance(node, Around) else node.kind


def _within(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _within(child)


def _with_depths(node: Node, depth: int) -> Iterator[tuple[int, Node]]:
    yield depth, node
    for child in node.children:
        yield from _with_depths(child, depth + 1)
