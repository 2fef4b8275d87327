"""What caches that evict the least recently used block would find: how memory and disk should be sized for a load."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from serve.conversations import Conversation

# A prompt as its blocks in order: what tells a block with all before it from others, and its tokens.
Blocks = Sequence[tuple[Hashable, int]]


class _Lru:
    """Of so many tokens."""

    def __init__(self, tokens: int):
        self._tokens, self._held = tokens, 0
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()

    def find(self, blocks: Blocks) -> int:
        """Tokens of the longest prefix that is there; all of it is there afterwards, as far as there is room."""
        found = 0
        for key, tokens in blocks:
            if key not in self._blocks:
                break
            found += tokens
        for key, tokens in reversed(blocks):  # a prefix goes from its end: its beginning is used last
            if key not in self._blocks:
                self._held += tokens
            self._blocks[key] = tokens
            self._blocks.move_to_end(key)
        while self._held > self._tokens:
            self._held -= self._blocks.popitem(last=False)[1]
        return found


def shares(prompts: Iterable[Blocks], **tiers: int) -> dict[str, float]:
    """Shares of all prompt tokens that each tier would find, and ``computed``. ``tiers``: tokens of each from the
    fastest on; a slower one has what fell out of those before it."""
    sizes, total = list(tiers.values()), 0
    caches = [_Lru(sum(sizes[: i + 1])) for i in range(len(sizes))]
    found = [0] * len(sizes)
    for blocks in prompts:
        total += sum(tokens for _, tokens in blocks)
        for i, cache in enumerate(caches):
            found[i] += cache.find(blocks)
    steps = [now - before for before, now in zip([0, *found], found, strict=False)]
    out = {name: round(step / total, 4) if total else 0.0 for name, step in zip(tiers, steps, strict=True)}
    return {**out, "computed": round(1 - sum(out.values()), 4)}


def prompts_of(conversations: Sequence[Conversation], block: int = 64) -> list[Blocks]:
    """In the order in which they are asked if all conversations go on at the same pace, in blocks of ``block`` tokens.
    Answers differ by their turn alone."""
    rounds = max((len(c.turns) for c in conversations), default=0)
    out: list[Blocks] = []
    histories: dict[int, list[int]] = {c.number: list(c.opening) for c in conversations}
    for turn in range(rounds):
        for c in conversations:
            if turn < len(c.turns):
                history = histories[c.number]
                history += c.turns[turn].new
                out.append(_hashed(history, block))
                history += [-(c.number * rounds + turn) - 1] * c.turns[turn].output
    return out


def _hashed(tokens: Sequence[int], block: int) -> Blocks:
    key, out = 0, []
    for begin in range(0, len(tokens) - block + 1, block):
        key = hash((key, *tokens[begin : begin + block]))
        out.append((key, block))
    return out
