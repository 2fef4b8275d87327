"""Attention over the last ``window`` tokens, the token itself included."""

from typing import ClassVar

from vllm_kvtier.cache_kinds.base import CacheKind, Contents, Split


class SlidingWindow(CacheKind):
    name = stored_as = "sliding"
    specs: ClassVar = {"SlidingWindowSpec": Contents.KV}
    layer_types: ClassVar[tuple[str, ...]] = ("sliding_attention",)
    window_field = "sliding_window"
    whole_prefix = False

    def num_skipped_tokens(self, computed: int) -> int:
        assert self.window is not None
        return max(0, computed - self.window + 1)

    def held_tokens(self) -> int | None:
        return self.window


class SlidingWindowMLA(SlidingWindow):
    name = "sliding_mla"
    specs: ClassVar = {"SlidingWindowMLASpec": Contents.OPAQUE}
    layer_types: ClassVar[tuple[str, ...]] = ()
    split = Split.COPIES
