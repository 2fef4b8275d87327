"""A recurrent state: Mamba 1 and 2, linear attention (gated delta net, Kimi delta attention), short convolutions."""

from typing import ClassVar

from vllm_kvtier.cache_kinds.base import CacheKind, Contents, InFlight, Split


class Mamba(CacheKind):
    """A block holds the whole state behind its last token, not its tokens. With vLLM's ``mamba_cache_mode`` "align" a
    request has one state, behind its last token, which each step changes in place. Where a step ends with a block, the
    next one goes on in another block. vLLM's prefix cache keeps some of those left behind; the table has no others.

    A prefix needs the one state exactly at its end. No token can be computed again behind a state: it would take the
    token twice.
    """

    name = stored_as = "mamba"
    specs: ClassVar = {"MambaSpec": Contents.STATE}
    layer_types: ClassVar[tuple[str, ...]] = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
    models: ClassVar = {
        "Mamba 1": "Jamba, Falcon Mamba",
        "Mamba 2": "Nemotron-H, Zamba 2, Granite 4, Falcon-H1",
        "gated delta net": "Qwen3-Next, Qwen3.5, Olmo hybrid",
        "Kimi delta attention": "Kimi Linear, Kimi K3",
        "linear attention": "Ling",
        "short convolutions": "LFM2",
    }
    whole_prefix = False
    by_position = False
    split = Split.RANKS
    required: ClassVar = {"mamba_cache_mode": "align"}

    def num_skipped_tokens(self, computed: int) -> int:
        return max(0, computed - 1)

    def first_needed(self, tokens: int) -> int:
        return max(0, tokens - 1)

    def taken_blocks(self, num_blocks: int, block_tokens: int, in_flight: InFlight) -> int:
        """The states that a step begins and ends with, one for each token that is speculated, and one that is saved
        from within the step or copied from a state of the prefix cache."""
        return min(num_blocks, 2) + 1 + in_flight.drafts

    def usable_tokens(self, tokens: int, prompt: int) -> int:
        return tokens if tokens < prompt else 0

    def lookup_tokens(self, prompt: int) -> int:
        return prompt - 1
