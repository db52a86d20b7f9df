"""Which messages must be judged together."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Final

_BITS: Final = (1 << 64) - 1
_FILL: Final = 0.75
_GROWTH: Final = 1.5
_BEGIN: Final = 1 << 10


class Links:
    """Keys, message IDs and lease tokens, and which of them are of one group.

    Each is a node, the hash of its kind and itself in 64 bits: groups may only become larger by two
    that are equal. A node has a row only where it belongs to another one, so one or more for each
    message and each lease, in two arrays: its hash, and that of the node that it belongs to. The
    row is the first free one from the hash on, modulo their length. That takes 21 to 32 bytes for
    each, and 53 while the arrays grow.
    """

    def __init__(self) -> None:
        self._make(_BEGIN)

    def join(self, node: int, other: int) -> None:
        """Both are of one group from now on."""
        root, other_root = self.root(node), self.root(other)
        if root != other_root:
            self._put(root, other_root)

    def root(self, node: int) -> int:
        """Names the group of a node: alike for all nodes of it, until it is joined to another."""
        row = self._row(node)
        if not self._nodes[row]:
            return node
        parent = self._parents[row]
        above = self._row(parent)
        while self._nodes[above]:
            parent = self._parents[row] = self._parents[above]
            above = self._row(parent)
        return parent

    def __contains__(self, node: int) -> bool:
        """Whether it was joined to another, as the first of both."""
        return self._nodes[self._row(node)] != 0

    def _make(self, rows: int) -> None:
        self._rows, self._count = rows, 0
        self._nodes, self._parents = (array("Q", bytes(8 * rows)) for _ in range(2))

    def _row(self, node: int) -> int:
        """Where it is, or where it would go."""
        nodes, rows = self._nodes, self._rows
        row = node % rows
        while nodes[row] and nodes[row] != node:
            row = (row + 1) % rows
        return row

    def _put(self, node: int, parent: int) -> None:
        if self._count >= self._rows * _FILL:
            self._grow()
        row = self._row(node)
        self._nodes[row], self._parents[row] = node, parent
        self._count += 1

    def _grow(self) -> None:
        nodes, parents = self._nodes, self._parents
        self._make(int(self._rows * _GROWTH) | 1)
        for node, parent in zip(nodes, parents, strict=True):
            if node:
                row = self._row(node)
                self._nodes[row], self._parents[row] = node, parent
                self._count += 1


def node(kind: str, name: Hashable) -> int:
    """The node of a key, an ID or a token, which is never 0."""
    return hash((kind, name)) & _BITS or 1
