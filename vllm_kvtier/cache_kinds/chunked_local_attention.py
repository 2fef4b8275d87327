"""Attention over the tokens of the same chunk, of ``window`` tokens (Llama 4)."""

from typing import ClassVar

from vllm_kvtier.cache_kinds.base import CacheKind, Contents


class ChunkedLocalAttention(CacheKind):
    """At the beginning of a chunk nothing is needed. ``first_needed`` has the chunk before nevertheless: a reader may
    compute its last token again."""

    name = stored_as = "chunked"
    specs: ClassVar = {"ChunkedLocalAttentionSpec": Contents.KV}
    layer_types = ("chunked_attention",)
    models: ClassVar = {"chunked local attention": "Llama 4"}
    window_field = "attention_chunk_size"
    whole_prefix = False

    def num_skipped_tokens(self, computed: int) -> int:
        assert self.window is not None
        return computed // self.window * self.window

    def held_tokens(self) -> int:
        return 0  # at the end of a chunk
