"""Groups of neighbouring transforms of a chain that run as one node, so that each bucket is loaded only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from muonfx.core import Transform
from muonfx.program.lower import named_chain
from muonfx.program.nodes import ChainNode, Node, Stage

__all__ = ["Now", "Span", "spans_of"]

Now = Transform | tuple[Transform, ...]
"""The transform that a node was lowered from, with its current numbers; a tuple for several members of a chain."""


class Span(NamedTuple):
    """Neighbouring members of a chain that one node executes."""

    names: tuple[str, ...]
    first: int
    """The index of the first member in the chain."""
    node: Node
    is_run: bool
    """True if the node's state is a dict of the members' states, also for one member."""

    def now(self, chain: Now) -> Now:
        """Return the members with their current numbers."""
        children = chain if isinstance(chain, tuple) else chain.children
        return children[self.first : self.first + len(self.names)] if self.is_run else children[self.first]


def spans_of(node: ChainNode, is_unit: Callable[[Node], bool]) -> list[Span]:
    """Join neighbouring units of a chain to spans, and return all spans in order.

    A unit is a node that can run on any subset of the leaves, for which `is_unit` returns True.
    """
    spans: list[Span] = []
    first = 0
    for names, child in _entries(node, is_unit):
        before = spans[-1] if spans else None
        joins = is_unit(child) and child.keeps_numbers
        if before is not None and joins and is_unit(before.node) and before.node.keeps_numbers:
            spans[-1] = Span((*before.names, *names), before.first, _joined(before, names, child), is_run=True)
        else:
            spans.append(Span(names, first, child, isinstance(child, Stage)))
        first += len(names)
    return spans


def _entries(node: ChainNode, is_unit: Callable[[Node], bool]) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield the nodes of a chain; if leaves are whole already, yield the members of a matrix stage one by one."""
    for names, child in node.entries:
        if isinstance(child, Stage) and is_unit(child):
            yield from (((member.name,), member.node) for member in child.members)
        else:
            yield names, child


def _joined(before: Span, names: tuple[str, ...], child: Node) -> ChainNode:
    """Join two neighbouring units to one node."""
    first = before.node
    known = first.entries if before.is_run and isinstance(first, ChainNode) else ((before.names, first),)
    entries = (*known, (names, child))
    children = tuple(node for _, node in entries)
    tx = named_chain((own[0], node.tx) for own, node in entries)
    place = tx, first.names, first.state, first.numbers, first.like, first.keeps_numbers
    return ChainNode(*place, entries=entries, children=children)
