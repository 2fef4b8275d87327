"""One walk of a prompt for all engines' indexes finds what a walk for each of them would."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.proxy.kv_events.index import BlockIndex, PromptTokens
from vllm_kvtier.proxy.kv_events.messages import Removed, Stored, Tier
from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks

SIZE, BLOCKS = 2, 8
SALT, ADAPTER = "salt", "ada"

steps = st.tuples(
    st.integers(0, 3),  # engine
    st.sampled_from(["stored", "stored", "stored", "removed"]),
    st.sampled_from(list(Tier)),
    st.integers(0, BLOCKS - 1),  # the first block
    st.integers(1, BLOCKS),  # how many
    st.integers(0, BLOCKS),  # tokens from this block on are others
    st.sampled_from([None, ADAPTER]),
)


def tokens_of(other: int) -> list[int]:
    return [block + (100 if block >= other else 0) for block in range(BLOCKS) for _ in range(SIZE)]


def hashes_of(tokens: list[int], seed: int, adapter: str | None) -> list[int]:
    hashes = []
    for at in range(0, len(tokens), SIZE):
        parent = hashes[-1] if hashes else seed
        hashes.append(hash((parent, adapter, *tokens[at : at + SIZE])) & (1 << 63) - 1 | 1)
    return hashes


def events_of(step, seed: int, size: int):
    _, kind, tier, begin, count, other, adapter = step
    tokens = tokens_of(other)
    hashes = hashes_of(tokens, seed, adapter)
    end = min(BLOCKS, begin + count)
    if kind == "removed":
        return [Removed(tier, 0, hashes[begin:end])]
    extra = [[adapter] if adapter else None for _ in range(begin, end)]
    if begin == 0:
        extra[0] = [adapter, SALT] if adapter else [SALT]
    parent = hashes[begin - 1] if begin else None
    return [Stored(tier, 0, size, parent, hashes[begin:end], tokens[begin * SIZE : end * SIZE], extra, adapter)]


def walk_alone(index: BlockIndex, prompt: PromptTokens) -> list[int]:
    """By itself, block by block."""
    found = [0] * len(Tier)
    if not index._block_size:
        return found
    extra, later = prompt.extra(prompt.model in index._adapters)
    usable, parent = -1, 0
    for digest in prompt.blocks(index._block_size):
        key = hash((parent, extra, digest))
        block_hash = index._hashes.get(key, 0)
        tiers = index._blocks.get(block_hash, 0) & (1 << len(Tier)) - 1 & usable
        if not tiers and index._uses:
            block_hash, tiers = index._shared.find(key)
            tiers &= index._uses
        if not tiers:
            break
        if not tiers & 1 << Tier.GPU:
            usable = ~(1 << Tier.GPU)
        found[(tiers & -tiers).bit_length() - 1] += index._block_size
        parent, extra = block_hash, later
    return found


@given(
    st.lists(steps, max_size=40),
    st.tuples(*[st.integers(0, 1)] * 4),
    st.permutations(range(4)),
    st.integers(0, BLOCKS),
    st.sampled_from([ADAPTER, "base"]),
    st.integers(1, SIZE * BLOCKS),
)
def test_one_walk_finds_what_each_engines_walk_finds(seen, seeds, order, other, model, length):
    shared = SharedBlocks()
    indexes = [BlockIndex(1000, shared) for _ in range(4)]
    for step in seen:
        indexes[step[0]].apply(events_of(step, seeds[step[0]], SIZE))
    prompt, walks = PromptTokens(tokens_of(other)[:length], SALT, model), {}
    for engine in order:
        alone = walk_alone(indexes[engine], prompt)
        assert indexes[engine].prefix(prompt, walks) == alone == indexes[engine].prefix(prompt)
