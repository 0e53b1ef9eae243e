"""The radix prefix cache: a tree whose paths spell the token sequences with resident KV.

A node holds a run of whole pages: the ids and the locations of their KV. Children are keyed by
their first token (page size 1) or the tuple of their first page, so two children never share a
page. Matching walks down and cuts a node where the sequence leaves it; locking counts references
from a node up to its root; eviction takes unlocked leaves in the order of their last use.

Recency is a counter that each match or insert advances and writes along its path. A leaf that is
used goes to the end of `_recent`, which is thus in the order of last use. The few leaves that
become evictable long after their last use (their lock went, or their last child) wait in the heap
`_older`, at most one entry each; an entry that has become wrong is dropped or corrected when it
comes up. So a use costs O(1), an eviction O(log n), and the tree is never walked. Nodes that were
last used together lie on a path, which has one leaf, so the order of eviction is unique.

May import `core` (the default page size) and `utils`. Invariants: what
`check_integrity` states, and every unlocked leaf waits in `_recent` or `_older`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core import get_global_ctx
from minisgl.utils import align_down

from .base import (
    BaseCacheHandle,
    BasePrefixCache,
    CachedPrefix,
    InsertResult,
    MatchResult,
    SizeInfo,
)

Ids: TypeAlias = npt.NDArray[np.int32]
_NO_IDS: Ids = np.empty(0, dtype=np.int32)


class RadixTreeNode:
    """A run of cached pages. `ref_count` is the number of locked handles at it or below it."""

    __slots__ = (
        "children",
        "indices",
        "is_queued",
        "key",
        "last_use",
        "parent",
        "ref_count",
        "salt",
        "serial",
    )

    def __init__(
        self,
        key: Ids,
        indices: torch.Tensor,
        last_use: int,
        serial: int,
        parent: RadixTreeNode | None = None,
        salt: str | None = None,
    ) -> None:
        self.key = key
        self.indices = indices
        self.parent = parent
        self.children: dict[Hashable, RadixTreeNode] = {}
        self.last_use = last_use
        self.serial = serial
        self.salt = salt
        self.ref_count = 0
        self.is_queued = False

    @property
    def length(self) -> int:
        """Number of tokens, a multiple of the page size; 0 for a root."""
        return len(self.key)

    @property
    def is_root(self) -> bool:
        """Whether it is a root: an empty run, never evicted, the only node that has a salt."""
        return self.salt is not None

    @property
    def is_evictable(self) -> bool:
        """Whether nothing protects it: it is a leaf of the tree and no handle at it is locked."""
        return not self.ref_count and not self.children and self.parent is not None

    def __repr__(self) -> str:
        return f"RadixTreeNode(length={self.length}, refs={self.ref_count}, use={self.last_use})"


@dataclass(frozen=True, eq=False)
class RadixCacheHandle(BaseCacheHandle):
    """The prefix that ends where `node` ends. A cut keeps it valid: the lower part stays `node`."""

    node: RadixTreeNode

    def get_matched_indices(self) -> torch.Tensor:
        """The locations from the root down to the end of `node`."""
        parts = [node.indices for node in _path_to_root(self.node)]
        parts.reverse()
        return parts[0] if len(parts) == 1 else torch.cat(parts[1:])


class RadixPrefixCache(BasePrefixCache):
    """Shares the KV of equal prefixes among requests, one tree for each salt.

    page_size: None takes the current context's.
    """

    def __init__(self, device: torch.device | str, page_size: int | None = None) -> None:
        self.device = torch.device(device)
        self.page_size = get_global_ctx().page_size if page_size is None else page_size
        self._empty = torch.empty(0, dtype=torch.int32, device=self.device)
        self._clock = 0
        self._num_made = 0
        self._evictable_size = 0
        self._protected_size = 0
        self._recent: OrderedDict[RadixTreeNode, None] = OrderedDict()
        self._older: list[tuple[int, int, RadixTreeNode]] = []
        self.root_node = self._new_root("")
        self._roots: dict[str, RadixTreeNode] = {"": self.root_node}

    @property
    def size_info(self) -> SizeInfo:
        """The cached tokens by state, kept up to date, never counted."""
        return SizeInfo(self._evictable_size, self._protected_size)

    def match_prefix(self, input_ids: torch.Tensor, salt: str = "") -> MatchResult:
        """The longest page-aligned cached prefix; an unknown salt has none and leaves no trace."""
        ids = _as_ids(input_ids)
        root = self._roots.get(salt)
        if root is None:
            return MatchResult(RadixCacheHandle(0, self._new_root(salt)))
        node, matched_len = self._walk(root, ids[: align_down(len(ids), self.page_size)])
        return MatchResult(RadixCacheHandle(matched_len, node))

    def insert_prefix(
        self, input_ids: torch.Tensor, indices: torch.Tensor, salt: str = ""
    ) -> InsertResult:
        """Cache the whole pages of `input_ids`; what is new becomes one evictable leaf."""
        ids = _as_ids(input_ids)
        length = align_down(len(ids), self.page_size)
        assert len(indices) >= length, f"{len(indices)} locations for {length} tokens"
        root = self._roots.get(salt)
        if root is None:
            root = self._new_root(salt)
            if length:
                self._roots[salt] = root
        node, cached_len = self._walk(root, ids[:length])
        if cached_len < length:
            leaf = self._new_node(
                ids[cached_len:length].copy(),
                indices[cached_len:length].detach().to(self.device, copy=True),
                self._clock,
                node,
            )
            node.children[self._child_key(leaf.key, 0)] = leaf
            self._recent.pop(node, None)
            self._evictable_size += leaf.length
            self._enqueue(leaf)
            node = leaf
        return InsertResult(cached_len, RadixCacheHandle(length, node))

    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        """Move the path of `handle` between evictable and protected as its first or last lock."""
        assert isinstance(handle, RadixCacheHandle)
        start = handle.node
        assert start.parent is not None or start.is_root, "the handle's prefix was evicted"
        for node in _path_to_root(start):
            if unlock:
                assert node.ref_count > 0, "unlocked more often than locked"
                node.ref_count -= 1
                if not node.ref_count:
                    self._evictable_size += node.length
                    self._protected_size -= node.length
            else:
                if not node.ref_count:
                    self._evictable_size -= node.length
                    self._protected_size += node.length
                node.ref_count += 1
        if start.is_evictable:
            self._enqueue(start)
        else:
            self._recent.pop(start, None)

    def shared_lens(self, handles: Sequence[BaseCacheHandle | None]) -> list[int]:
        """Of each prefix, how many tokens lie in the prefix of a handle before it in the list."""
        seen: set[RadixTreeNode] = set()
        shared = []
        for handle in handles:
            length = 0 if handle is None else handle.cached_len
            for node in _path_to_root(handle.node) if isinstance(handle, RadixCacheHandle) else ():
                if node in seen:
                    break
                seen.add(node)
                length -= len(node.key)
            shared.append(length)
        return shared

    def evict(
        self, size: int, on_evict: Callable[[CachedPrefix], None] | None = None
    ) -> torch.Tensor:
        """Free least recently used unlocked leaves, and their parents after them."""
        if size > self._evictable_size:
            raise RuntimeError(
                f"cannot evict {size} tokens: only {self._evictable_size} are evictable, "
                f"{self._protected_size} are locked"
            )
        freed: list[torch.Tensor] = []
        num_freed = 0
        while num_freed < size:
            leaf = self._pop_least_recent()
            if on_evict is not None:
                on_evict(_spell_out(leaf))
            num_freed += leaf.length
            freed.append(leaf.indices)
            self._unlink(leaf)
        self._evictable_size -= num_freed
        return torch.cat(freed) if freed else self._empty

    def prefixes(self) -> Iterator[CachedPrefix]:
        """The prefix that ends in each leaf, least recently used first."""
        leaves = [node for node in self._nodes() if not node.children and not node.is_root]
        for leaf in sorted(leaves, key=lambda leaf: (leaf.last_use, leaf.serial)):
            yield _spell_out(leaf)

    def resident_indices(self) -> torch.Tensor:
        """Every location in the tree; walks all of it, for checks and tests."""
        parts = [node.indices for node in self._nodes() if not node.is_root]
        return torch.cat(parts) if parts else self._empty

    def check_integrity(self, handles: Iterable[BaseCacheHandle] | None = None) -> None:
        """Recount everything: links, keys, whole pages, recency, references, sizes, the heap."""
        nodes = list(self._nodes())
        queued = {leaf: last_use for last_use, _, leaf in self._older}
        uses = [leaf.last_use for leaf in self._recent]
        if len(queued) != len(self._older) or uses != sorted(uses):
            raise _broken("the leaves that wait for eviction are out of order")
        total = locked = 0
        for node in nodes:
            if node.ref_count < sum([child.ref_count for child in node.children.values()]):
                raise _broken(f"{node} is locked less often than its children")
            for key, child in node.children.items():
                if fault := self._find_fault(node, key, child):
                    raise _broken(f"{child} {fault}, its parent is {node}")
            if node.is_evictable != (node in self._recent) and (
                node in self._recent or queued.get(node, node.last_use + 1) > node.last_use
            ):
                raise _broken(f"{node} waits for eviction, but may not go, or the reverse")
            total += len(node.key)
            locked += len(node.key) if node.ref_count else 0
        if self.size_info != (total - locked, locked):
            raise _broken(f"{total - locked} + {locked} tokens are cached, not {self.size_info}")
        if handles is not None:
            self._check_references(nodes, handles)

    def _find_fault(self, node: RadixTreeNode, key: Hashable, child: RadixTreeNode) -> str | None:
        """I5 between a node and one of its children: what is wrong, if anything."""
        length = len(child.key)
        if child.parent is not node or child.is_root:
            return "has a wrong parent"
        if not length or length % self.page_size or child.indices.shape[0] != length:
            return "is not whole pages, each token with its location"
        if self._child_key(child.key, 0) != key:
            return f"stands under the key {key}"
        if child.last_use > node.last_use:
            return "is more recent than its parent"
        return None

    def _check_references(
        self, nodes: list[RadixTreeNode], handles: Iterable[BaseCacheHandle]
    ) -> None:
        """I4: a reference count is the number of live handles at or below the node."""
        counts = dict.fromkeys(nodes, 0)
        for handle in handles:
            assert isinstance(handle, RadixCacheHandle)
            path = list(_path_to_root(handle.node))
            if not path[-1].is_root or sum(len(node.key) for node in path) != handle.cached_len:
                raise _broken(f"{handle} is locked, but its path is {path}")
            for node in path:
                if node in counts:
                    counts[node] += 1
                elif node.length:
                    raise _broken(f"{node} is locked, but not in the tree")
        for node, count in counts.items():
            if node.ref_count != count and not node.is_root:
                raise _broken(f"{node} has {count} live handles")

    def _nodes(self) -> Iterator[RadixTreeNode]:
        """Every node, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, root: RadixTreeNode, ids: Ids) -> tuple[RadixTreeNode, int]:
        """Follow `ids` (whole pages) down from `root`, marking the path as just used."""
        self._clock += 1
        node, position = root, 0
        node.last_use = self._clock
        while position < len(ids):
            child = node.children.get(self._child_key(ids, position))
            if child is None:
                break
            common_len = align_down(_common_prefix_len(child.key, ids[position:]), self.page_size)
            if common_len < child.length:
                child = self._split(child, common_len)
            child.last_use = self._clock
            node = child
            position += common_len
        if node.is_evictable:
            self._enqueue(node)
        return node, position

    def _split(self, node: RadixTreeNode, length: int) -> RadixTreeNode:
        """Cut `node` after `length` tokens; the upper part is new, the lower part stays `node`.

        Both parts copy, so that evicting one lets go of its memory.
        """
        parent = node.parent
        assert parent is not None and 0 < length < node.length
        upper = self._new_node(
            node.key[:length].copy(), node.indices[:length].clone(), node.last_use, parent
        )
        upper.ref_count = node.ref_count
        node.key = node.key[length:].copy()
        node.indices = node.indices[length:].clone()
        node.parent = upper
        upper.children[self._child_key(node.key, 0)] = node
        parent.children[self._child_key(upper.key, 0)] = upper
        return upper

    def _unlink(self, leaf: RadixTreeNode) -> None:
        """Take an evicted leaf out of the tree; its parent may be the next to go."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._child_key(leaf.key, 0)]
        leaf.parent = None
        if parent.is_evictable:
            self._enqueue(parent)
        elif parent.salt and not parent.children:
            del self._roots[parent.salt]

    def _enqueue(self, leaf: RadixTreeNode) -> None:
        """Let an evictable leaf wait for its turn, as its last use demands."""
        if leaf.last_use == self._clock:
            self._recent[leaf] = None
            self._recent.move_to_end(leaf)
        elif not leaf.is_queued:
            leaf.is_queued = True
            heapq.heappush(self._older, (leaf.last_use, leaf.serial, leaf))

    def _pop_least_recent(self) -> RadixTreeNode:
        """The least recently used evictable leaf, which no longer waits; there must be one."""
        recent, older = self._recent, self._older
        while older:
            last_use, serial, leaf = older[0]
            if leaf in recent or not leaf.is_evictable:
                heapq.heappop(older)[2].is_queued = False
            elif last_use != leaf.last_use:
                heapq.heapreplace(older, (leaf.last_use, serial, leaf))
            else:
                break
        first = next(iter(recent), None)
        if first is not None and not (older and older[0][0] < first.last_use):
            del recent[first]
            return first
        leaf = heapq.heappop(older)[2]
        leaf.is_queued = False
        return leaf

    def _child_key(self, ids: Ids, position: int) -> Hashable:
        if self.page_size == 1:
            return int(ids[position])
        return tuple(ids[position : position + self.page_size].tolist())

    def _new_node(
        self, key: Ids, indices: torch.Tensor, last_use: int, parent: RadixTreeNode
    ) -> RadixTreeNode:
        self._num_made += 1
        return RadixTreeNode(key, indices, last_use, self._num_made, parent=parent)

    def _new_root(self, salt: str) -> RadixTreeNode:
        return RadixTreeNode(_NO_IDS, self._empty, self._clock, 0, salt=salt)


def _as_ids(ids: Any) -> Ids:
    """Token ids as an int32 array, without a copy where they are one."""
    if isinstance(ids, torch.Tensor):
        ids = ids.numpy()
    return np.asarray(ids, dtype=np.int32)


def _common_prefix_len(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    num_both = min(len(a), len(b))
    differs = a[:num_both] != b[:num_both]
    first = int(differs.argmax())
    return first if differs[first] else num_both


def _path_to_root(node: RadixTreeNode) -> Iterator[RadixTreeNode]:
    """`node`, its parent, and so on up to the root."""
    current: RadixTreeNode | None = node
    while current is not None:
        yield current
        current = current.parent


def _spell_out(node: RadixTreeNode) -> CachedPrefix:
    """The prefix that ends where `node` ends."""
    *path, root = _path_to_root(node)
    path.reverse()
    ids = np.concatenate([part.key for part in path])
    return CachedPrefix(ids, torch.cat([part.indices for part in path]), root.salt or "")


def _broken(what: str) -> RuntimeError:
    return RuntimeError(f"radix cache integrity: {what}")
