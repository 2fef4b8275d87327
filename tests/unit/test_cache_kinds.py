"""Kinds of KV cache groups: against vLLM's own managers, and against what each kind of attention reads."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cache_groups import cache_groups, needs
from vllm.v1 import kv_cache_interface
from vllm.v1.core import single_type_kv_cache_manager as managers

import vllm_kvtier
from vllm_kvtier import cache_kinds
from vllm_kvtier.cache_kinds import KINDS, CacheGroup
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.store.index.types import GroupShape
from vllm_kvtier.vllm_compat.layout.groups import cache_group

PACKAGE = Path(vllm_kvtier.__file__).parent
MANAGERS = {
    "full": managers.FullAttentionManager,
    "sliding": managers.SlidingWindowManager,
    "chunked": managers.ChunkedLocalAttentionManager,
    "mamba": managers.MambaManager,
}
WINDOWS = (1, 5, 8, 16)
ALL = [kind(window) for kind in KINDS.values() for window in (WINDOWS if kind.window_field else (None,))]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.describe())
def test_cache_kind_skips_what_vllm_skips(kind):
    theirs = MANAGERS[kind.stored_as].get_num_skipped_tokens
    manager = SimpleNamespace(extra_retained_tokens=0, **({kind.window_field: kind.window} if kind.window else {}))
    assert [kind.num_skipped_tokens(n) for n in range(70)] == [max(0, theirs(manager, n)) for n in range(70)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.describe())
def test_cache_kind_needs_what_attention_reads(kind):
    for tokens in range(1, 70):
        read = [token for token in range(tokens) if needs(kind, tokens, token)]
        assert read == list(range(kind.first_needed(tokens), tokens))
        assert kind.first_needed(tokens) <= kind.num_skipped_tokens(tokens), "what it loads suffices to go on"
        assert kind.whole_prefix <= (kind.first_needed(tokens) == 0)


@pytest.mark.parametrize("kind", [kind for kind in ALL if not kind.whole_prefix], ids=lambda kind: kind.describe())
def test_cache_group_own_blocks_are_those_vllm_did_not_free(kind):
    group = CacheGroup(4, kind)
    for computed in range(70):
        own = group.first_own_block(computed)
        assert group.num_skipped_blocks(computed) <= own or own == computed // 4
        assert own <= computed // 4, "the block that the step fills is the request's own"


def test_cache_kinds_with_a_whole_prompt_at_hand_take_what_can_be_computed_again():
    """Over the same blocks, or without the last token; behind a state no token can be computed again."""
    taken = {kind.stored_as: (kind.usable_tokens(9, 9), kind.lookup_tokens(9)) for kind in ALL}
    assert taken == {"full": (9, 9), "sliding": (8, 9), "chunked": (8, 9), "mamba": (0, 8)}
    assert {kind.usable_tokens(5, 9) for kind in ALL} == {5}


@pytest.mark.parametrize("window", [None, 5])
def test_draft_layers_kv_that_depends_on_other_tokens_is_computed_again(window):
    """KV of draft layers at a position depends on the tokens behind it, which a shorter hit does not name."""
    groups = cache_groups([(4, None), (4, window)])
    for ahead in (1, 3):
        geometry, plain = BlockGeometry(groups, 4, draft_lookahead=ahead), BlockGeometry(groups, 4)
        assert [geometry.usable_tokens(n, 50) for n in (0, 1, 4, 48)] == [0, max(0, 1 - ahead), 4 - ahead, 48 - ahead]
        assert plain.usable_tokens(48, 50) == 48
    # vLLM computes the last token of a prompt again by itself.
    assert BlockGeometry(groups, 4, draft_lookahead=1).usable_tokens(48, 48) == plain.usable_tokens(48, 48)
    assert geometry.usable_tokens(48, 48) == 45
    states = [*groups, CacheGroup(4, KINDS["mamba"]())]
    behind_states = BlockGeometry(states, 4, draft_lookahead=1)
    assert behind_states.usable_tokens(48, 50) == 48, "behind a state no token can be computed again"


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("modules", [1, 2, 3, 4])
def test_stored_window_suffices_for_chained_draft_modules(modules, whole_blocks):
    """vLLM keeps a token more before a window for each draft module behind the first, and a connector must fill what
    it gives a request. Of a hit the draft modules' last positions are computed again, or the block that they are in."""
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    windows = kv_cache_interface.SlidingWindowSpec(**sizes, sliding_window=128, extra_retained_tokens=modules - 1)
    whole = kv_cache_interface.FullAttentionSpec(**sizes)
    groups = [cache_group(kv_cache_interface.KVCacheGroupSpec([], spec)) for spec in (whole, windows)]
    geometry = BlockGeometry(groups, 16, whole_blocks, modules)
    group = geometry.groups[1]
    stored = GroupShape(1, 1, group.stored_window, group.kind.stored_as)
    manager = SimpleNamespace(sliding_window=128, extra_retained_tokens=modules - 1)
    for hit in range(16, 800, 16 if whole_blocks else 1):
        tokens = geometry.usable_tokens(hit, 1000)
        given = max(0, MANAGERS["sliding"].get_num_skipped_tokens(manager, tokens) // 16)
        assert group.num_skipped_blocks(tokens) == given, "which blocks vLLM gives"
        assert group.first_needed_block(hit) == given, "what other engines lease and export has them"
        assert hit % 16 or stored.first_block(16, 0, hit // 16) == given, "a store's hit has them"


def test_cache_kinds_are_found_by_specification_and_layer_type():
    specs = [spec for kind in KINDS.values() for spec in kind.specs]
    assert len(set(specs)) == len(specs) and all(cache_kinds.of_spec(spec).specs[spec] for spec in specs)
    assert all(hasattr(kv_cache_interface, spec) for spec in specs if spec != "TQFullAttentionSpec"), "vLLM's names"
    assert cache_kinds.of_spec("RingSpec") is None and cache_kinds.of_layer_type("ring") is None
    assert cache_kinds.of_layer_type("chunked_attention") is KINDS["chunked"]


def test_codecs_encode_attention_of_known_contents_only():
    encodable = {spec for kind in KINDS.values() for spec, contents in kind.specs.items() if contents.encodable}
    assert encodable == {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec"}


@pytest.mark.parametrize(
    ("name", "window"), [("ring", None), ("full", 9), ("sliding", None), ("chunked", None), ("mla", 1)]
)
def test_cache_kind_unknown_or_with_wrong_window_raises(name, window):
    with pytest.raises(ValueError, match=name):
        cache_kinds.get(name, window)


def test_specifications_of_vllm_are_named_only_where_versions_are_known():
    """And no class of a kind is compared with: its properties are."""
    kinds = "|".join(kind.__name__ for kind in KINDS.values())
    specs = "|".join(name for name in vars(kv_cache_interface) if name.endswith("Spec"))
    words = re.compile(rf"\b({specs})\b|(\bis|[!=]=|, ) *(not )?({kinds})\b[^(]|\.specs\[|type\(spec\)")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if not {"cache_kinds", "vllm_compat"} & set(path.relative_to(PACKAGE).parts)
        for line in path.read_text("utf-8").splitlines()
        if words.search(line)
    ]
    assert found == []


def test_cache_kinds_only_are_asked_what_they_are():
    """No other module looks for a window or compares the name of a kind."""
    names = "|".join(KINDS)
    words = re.compile(rf"\bwindow is (not )?None|[!=]= *[\"']({names})[\"']|[\"']({names})[\"'] (not )?in ")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "cache_kinds"
        for line in path.read_text("utf-8").splitlines()
        if words.search(line)
    ]
    old = 'if self.window is not None and self.kind == "full":  # in journals from before there were more kinds'
    assert found == [f"store/index/types.py: {old}"]


def test_cache_kinds_of_any_window_that_a_peer_sends_are_forgotten():
    """Each lookup of another node's store names up to 64 of them: 60 MB/s stayed in the process."""
    first = cache_kinds.get("sliding", 1)
    for window in range(2, 10_000):
        cache_kinds.get("sliding", window)
    assert cache_kinds.get.cache_info().currsize < 5_000
    assert cache_kinds.get("sliding", 1) == first
