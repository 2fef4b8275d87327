"""Attention over the last ``window`` tokens, the token itself included, and the tokens that vLLM keeps before these."""

from typing import ClassVar

from vllm_kvtier.cache_kinds.base import CacheKind, Contents, Split


class SlidingWindow(CacheKind):
    name = stored_as = "sliding"
    specs: ClassVar = {"SlidingWindowSpec": Contents.KV}
    layer_types: ClassVar[tuple[str, ...]] = ("sliding_attention",)
    models: ClassVar = {"sliding windows": "Gemma 2, 3 and 4, gpt-oss, Cohere 2, MiMo, Step 3.5"}
    window_field = "sliding_window"
    retained_field = "extra_retained_tokens"  # chained draft modules compute the last tokens again
    whole_prefix = False

    def num_skipped_tokens(self, computed: int) -> int:
        assert self.window is not None
        return max(0, computed - self.window + 1)

    @property
    def stored_window(self) -> int:
        assert self.window is not None
        return self.window + self.recomputed - 1

    def held_tokens(self) -> int | None:
        return self.window


class SlidingWindowMLA(SlidingWindow):
    name = "sliding_mla"
    specs: ClassVar = {"SlidingWindowMLASpec": Contents.OPAQUE}
    layer_types: ClassVar[tuple[str, ...]] = ()
    models: ClassVar = {"sliding windows of MLA": "DeepSeek V4"}
    split = Split.COPIES
