"""Attention over all tokens before: K and V of every token, or MLA's latent."""

from typing import ClassVar

from vllm_kvtier.cache_kinds.base import CacheKind, Contents, Split


class FullAttention(CacheKind):
    """A FullAttentionSpec with a window is that of a model whose windows vLLM keeps like full attention."""

    name = stored_as = "full"
    specs: ClassVar = {"FullAttentionSpec": Contents.KV, "TQFullAttentionSpec": Contents.OPAQUE}
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "attention")
    models: ClassVar = {"full attention": "Llama 2 and 3, Qwen 2 and 3, Mistral, Phi, and most others"}
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
    models: ClassVar = {
        "MLA": "DeepSeek V2 and V3, Kimi K2",
        "MLA with a sparse indexer": "DeepSeek V3.2, GLM-5: latents and index keys",
        "compressed MLA": "DeepSeek V4",
    }
    split = Split.COPIES
