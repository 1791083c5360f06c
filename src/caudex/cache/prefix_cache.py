"""The prefix cache: which blocks of the KV pool hold which tokens, and which go when room is needed."""

from __future__ import annotations

from typing import Literal

from caudex import _core
from caudex.cache.policy import Policy

Index = Literal["radix", "hash"]
Sharing = Literal["isolated", "shared", "public", "k_anonymous"]


class PrefixCache(_core.PrefixCache):
    """A pool of KV blocks and an index of the prefixes that lie in it.

    The cache knows tokens and block ids; the KV tensors are the engine's. A request's way through it::

        cache = PrefixCache(num_blocks=1000, block_size=16)
        seq = cache.begin(prompt)                     # match and pin; seq.num_cached_tokens need no computing
        copies = seq.allocate(len(prompt))            # slots; copy blocks as told, then compute and write KV
        seq.commit(len(prompt))                       # matchable from now on, by anyone in the namespace
        seq.append([token])                           # and so on, a token at a time
        seq.release()                                 # unpin; what is committed stays cached until evicted

    Every block is exactly one of free, cached (evictable), or pinned (used by a running request). A call that raises
    changes nothing. All methods may be called from several threads; each is atomic.

    Parameters
    ----------
    num_blocks, block_size
        Size of the pool, and tokens a block.
    index
        ``"radix"`` matches to the token: a match that ends inside a block is served by copying that block's first
        slots (a partial hit). ``"hash"`` shares whole blocks only, found by chained block hashes.
    policy
        Which unpinned block goes first: a name, see :func:`policy_names`, or a :class:`Policy` of your own. Whatever it
        is, blocks go from the ends of the tree only, so a cached block's whole prefix is always cached too. The default
        learns from the traffic when what will be wanted again, and serves more than ``"lru"`` on real logs
        (benchmarks/eviction.py); ``"lru"`` costs some microseconds a request less.
    hash
        Algorithm of the chained block hashes; see :func:`hasher_names`. By default a fast keyed one: a collision costs
        a miss, never a wrong answer, since tokens are compared on every hit.
    secret
        Key of the block hashes. By default a random one, so that nobody outside the process can predict a hash; 0 makes
        hashes that are stable across processes.
    thrash_window
        How many evicted blocks are remembered, to count what is computed again; half as many as the pool by default.
    sharing
        What tenants of one namespace may share. ``"isolated"``: nothing. ``"shared"``: everything. ``"public"``: the
        prefixes given to :meth:`register_public`. ``"k_anonymous"``: what at least ``k`` different tenants have
        computed themselves since it was last evicted. Namespaces never share.
    pin_budget
        How many blocks :meth:`pin` may hold altogether; half of the pool by default.
    manual_clock
        The policies' clock stands still but for :meth:`set_time`, as a replay needs it.

    Costs: :meth:`match` and :meth:`begin` compare the prompt once, at memory speed; everything else is O(1) a block
    at any size of the pool and the tree.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        index: Index = "radix",
        policy: str | Policy = "gittins",
        hash: str | None = None,
        secret: int | None = None,
        thrash_window: int | None = None,
        sharing: Sharing = "isolated",
        k: int = 2,
        pin_budget: int | None = None,
        manual_clock: bool = False,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            index=index,
            policy=policy,
            hash=hash or ("fold64" if index == "radix" else "fold128"),
            secret=secret,
            thrash_window=thrash_window,
            sharing=sharing,
            k=k,
            pin_budget=pin_budget,
            manual_clock=manual_clock,
        )

    @staticmethod
    def like_vllm(num_blocks: int, block_size: int = 16) -> _core.VllmCache:
        """A cache that hits and evicts exactly as vLLM 0.32 does, for predictions.

        Whole blocks only, registered when allocated; the last token's block is computed again; a finished request's
        blocks join one free queue, last block first; equal blocks are all kept. Of `num_blocks`, vLLM sets one aside.
        Its requests take the calls of a :class:`Sequence` that decide about hits: allocate, append, commit, release.
        """
        return _core.VllmCache(num_blocks, block_size)

    @staticmethod
    def like_sglang(num_pages: int, page_size: int = 1) -> _core.SglangCache:
        """A cache that hits and evicts exactly as SGLang 0.5.23's radix cache with the policy lru, for predictions.

        Whole pages only; every look-up touches its path; leaves are evicted whole, by last access.
        """
        return _core.SglangCache(num_pages, page_size)
