"""An eviction policy in Python: the same six verbs as the built-in ones, slower, for trying ideas."""

from __future__ import annotations

from abc import ABC, abstractmethod

from caudex._core import EndedRequest, NodeView


class Policy(ABC):
    """Chooses which unpinned leaf of the tree loses its last block next.

    The tree's nodes are runs of blocks, named by small integers that may be used again once a node has gone.
    `self.nodes` tells about them (is it a leaf, how many tokens lie before it, ...). One instance serves one cache.

    A request's path is given to :meth:`end_request` while it is still pinned; then :meth:`offer` is called for each of
    its nodes that nobody else pins, the leaf first. Whatever a verb raises is reported as unraisable and does not reach
    the cache, which then falls back on the least recently used leaf. A verb must not call the cache.
    """

    nodes: NodeView

    @abstractmethod
    def end_request(self, request: EndedRequest, path: list[int]) -> None:
        """A request has ended; `path` is its nodes, the leaf first."""

    @abstractmethod
    def offer(self, node: int) -> None:
        """The node is unpinned now: a candidate once it is a leaf.

        Called again when its last child has gone.
        """

    @abstractmethod
    def withdraw(self, node: int) -> None:
        """The node is no candidate any more: pinned (`self.nodes.is_pinned`), or gone."""

    @abstractmethod
    def split(self, upper: int, lower: int) -> None:
        """The new node `upper` took over the first blocks of `lower`; it is a candidate exactly if `lower` is."""

    @abstractmethod
    def merge(self, upper: int, lower: int) -> bool:
        """May `upper` become one node with its only child `lower`, of which everything known stays?"""

    @abstractmethod
    def victim(self) -> int:
        """The unpinned leaf whose last block goes now."""
