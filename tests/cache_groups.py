"""KV cache groups for tests, from pairs."""

from collections.abc import Iterable

from vllm_kvtier.cache_kinds import CacheGroup, CacheKind
from vllm_kvtier.cache_kinds.chunked_local_attention import ChunkedLocalAttention
from vllm_kvtier.cache_kinds.full_attention import FullAttention
from vllm_kvtier.cache_kinds.mamba import Mamba
from vllm_kvtier.cache_kinds.sliding_window import SlidingWindow


def cache_groups(groups: Iterable[tuple]) -> list[CacheGroup]:
    """Of pairs (block tokens, window): None is full attention, a number a sliding window; groups stay as they are."""
    return [CacheGroup(size, kind) if hasattr(kind, "name") else
            CacheGroup(size, FullAttention() if kind is None else SlidingWindow(kind))
            for size, kind in groups]  # fmt: skip


def chunked(block_tokens: int, chunk: int) -> CacheGroup:
    return CacheGroup(block_tokens, ChunkedLocalAttention(chunk))


def mamba(block_tokens: int) -> CacheGroup:
    return CacheGroup(block_tokens, Mamba())


def reads(kind: CacheKind, position: int, token: int) -> bool:
    """Whether attention at ``position`` reads the KV of an earlier token, by what the kinds of attention are."""
    if isinstance(kind, SlidingWindow):
        return position - kind.window < token
    if isinstance(kind, ChunkedLocalAttention):
        return position // kind.window == token // kind.window
    return True


def needs(kind: CacheKind, tokens: int, token: int) -> bool:
    """Whether a reader of ``tokens`` tokens needs this one's KV: it goes on, or computes the last token again."""
    if isinstance(kind, Mamba):  # the state behind the last token, which cannot be computed again
        return token == tokens - 1
    return reads(kind, tokens, token) or reads(kind, tokens - 1, token)
