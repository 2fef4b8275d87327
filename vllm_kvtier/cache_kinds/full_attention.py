"""Attention over all tokens before: K and V of every token, or MLA's latent."""

from typing import ClassVar

from vllm_kvtier.cache_kinds.base import CacheKind, Contents, Split


class FullAttention(CacheKind):
    """A FullAttentionSpec with a window is that of a model whose windows vLLM keeps like full attention."""

    name = stored_as = "full"
    specs: ClassVar = {"FullAttentionSpec": Contents.KV, "TQFullAttentionSpec": Contents.OPAQUE}
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "attention")
    whole_prefix = True

    def num_skipped_tokens(self, computed: int) -> int:
        return 0

    def usable_tokens(self, tokens: int, prompt: int) -> int:
        """vLLM computes the last token again, over the same blocks."""
        return min(tokens, prompt)


class MLAAttention(FullAttention):
    name = "mla"
    specs: ClassVar = {"MLAAttentionSpec": Contents.LATENT}
    layer_types: ClassVar[tuple[str, ...]] = ()
    split = Split.COPIES
