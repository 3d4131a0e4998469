"""Which prefixes are cached: a radix tree over token ids whose nodes may carry a checkpoint.

A checkpoint is everything needed to continue after `position` tokens: the pages of the attention cache and
the pages that hold the recurrent state at exactly that position. Both live and die together, so a hit can
never pair pages with a state of another boundary. Tokens are compared exactly: there are no hash collisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3eval_local.engine.pages import Pages

TokenArray = npt.NDArray[np.int32]
_WIDTH = 4  # bytes of one token id


@dataclass(eq=False)
class Checkpoint:
    """A cached prefix of `position` tokens. The last of `pages` may be filled in part only."""

    position: int
    pages: Pages
    state_pages: Pages
    node: _Node | None = None


@dataclass(eq=False)
class _Node:
    edge: bytes
    """Token ids from the parent to here, as int32 bytes."""
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    """By the first token of their edge."""
    checkpoint: Checkpoint | None = None


class PrefixIndex:
    """Finds the longest cached prefix of a prompt and says which checkpoint to evict next."""

    def __init__(self) -> None:
        self._root = _Node(b"", None)
        self._by_age: OrderedDict[Checkpoint, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Checkpoint]:
        """Checkpoints, the next to evict first."""
        return iter(self._by_age)

    def match(self, tokens: TokenArray, limit: int) -> Checkpoint | None:
        """The deepest checkpoint whose tokens begin `tokens`, with position <= limit. Does not touch it."""
        data = tokens[:limit].tobytes()
        node, offset, best = self._root, 0, None
        while True:
            if node.checkpoint is not None:
                best = node.checkpoint
            child = node.children.get(data[offset : offset + _WIDTH])
            if child is None or not data.startswith(child.edge, offset):
                return best
            node, offset = child, offset + len(child.edge)

    def find(self, tokens: TokenArray, position: int) -> Checkpoint | None:
        """The checkpoint of exactly `tokens[:position]`."""
        found = self.match(tokens, position)
        return found if found is not None and found.position == position else None

    def insert(self, tokens: TokenArray, checkpoint: Checkpoint, *, evict_first: bool = False) -> None:
        """Adds the checkpoint of `tokens[:checkpoint.position]`, which must not exist yet.

        evict_first puts it at the cold end: it stays only while nobody needs the room, or until it is hit.
        """
        node = self._node_at(tokens[: checkpoint.position].tobytes())
        if node.checkpoint is not None:
            raise ValueError(f"a checkpoint at {checkpoint.position} exists for these tokens")
        node.checkpoint, checkpoint.node = checkpoint, node
        self._by_age[checkpoint] = None
        if evict_first:
            self._by_age.move_to_end(checkpoint, last=False)

    def touch(self, checkpoint: Checkpoint) -> None:
        """Marks it as just used."""
        self._by_age.move_to_end(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Forgets the checkpoint; releasing its pages is the caller's business."""
        node = checkpoint.node
        if node is None:
            raise ValueError("the checkpoint is not in the index")
        del self._by_age[checkpoint]
        node.checkpoint = checkpoint.node = None
        self._tidy(node)

    def _node_at(self, data: bytes) -> _Node:
        """The node for exactly these tokens, made (and an edge split) if need be."""
        node, offset = self._root, 0
        while offset < len(data):
            key = data[offset : offset + _WIDTH]
            child = node.children.get(key)
            if child is None:
                child = _Node(data[offset:], node)
                node.children[key] = child
                return child
            common = _common(child.edge, data[offset : offset + len(child.edge)])
            if common < len(child.edge):
                child = self._split(child, common)
            node, offset = child, offset + common
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        parent = node.parent
        if parent is None:
            raise ValueError("the root has no edge to split")
        upper = _Node(node.edge[:at], parent)
        parent.children[upper.edge[:_WIDTH]] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[node.edge[:_WIDTH]] = node
        return upper

    def _tidy(self, node: _Node) -> None:
        """Removes nodes that carry nothing and merges chains: the tree stays as small as its content."""
        while node.parent is not None and node.checkpoint is None:
            parent = node.parent
            if not node.children:
                del parent.children[node.edge[:_WIDTH]]
                node = parent
                continue
            if len(node.children) == 1:
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[:_WIDTH]] = child
            return


def _common(a: bytes, b: bytes) -> int:
    """Length in bytes of the common run of whole tokens."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    differ = np.frombuffer(a[:n], dtype=np.int32) != np.frombuffer(b[:n], dtype=np.int32)
    return int(differ.argmax()) * _WIDTH
