"""Two engines with blocks of different sizes and the same prompt, for tests of re-slicing; a plain model of what lands.

The prompt's KV is, by group and layer, uint8 [tokens, heads, bytes of a token].
"""

from dataclasses import replace

import numpy as np
from peer_caches import Group, Layout, head_range, held, keys_of, ranks_of, shuffled

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull


def layout(rng) -> Layout:
    gap = tuple(int(n) * 4 for n in rng.integers(0, 4, 3)) if rng.random() < 0.5 else (0, 0, 0)
    return Layout(bool(rng.integers(2)), bool(rng.integers(2)), gap)


class BlockSizeCase:
    """``theirs``, ``mine``: (tensor parallel size, pipeline stages) of the source and of us."""

    def __init__(self, seed: int, packed: bool = True):
        self.rng = rng = np.random.default_rng(seed)
        self.theirs, self.mine = ((int(rng.choice([1, 2, 4])), int(rng.choice([1, 1, 2]))) for _ in range(2))
        stages = max(self.theirs[1], self.mine[1])
        self.ratio = int(rng.choice([1, 2, 2, 4]))
        source, ours, self.prompt = [], [], []
        self.larger = bool(rng.integers(2))  # our blocks
        for _ in range(rng.integers(1, 3)):
            mla = rng.random() < 0.3
            small = int(rng.choice([1, 2, 4]))
            group = Group(
                layers=int(rng.integers(1, 3)) * stages, heads=1 if mla else int(rng.choice([1, 2, 4])), cells=small,
                inner=int(rng.choice([4, 8, 12, 16])), kind="mla" if mla else "full",
                cell_tokens=int(rng.choice([1, 1, 2])),
            )  # fmt: skip
            large = replace(group, cells=small * self.ratio)
            if rng.random() < 0.3:  # kernel blocks of the smaller size
                large = replace(group, parts=self.ratio)
            if packed and rng.random() < 0.3:
                small, inner = group.tokens, group.inner
                group, large = (
                    replace(group, cells=1, parts=1, cell_tokens=n, inner=n * inner, packed=True)
                    for n in (small, small * self.ratio)
                )
            source.append(group if self.larger else large)
            ours.append(large if self.larger else group)
        self.source_model, self.model = tuple(source), tuple(ours)
        self.blocks = 4 * self.ratio * len(self.model) + 4
        tokens = [3 * max(s.tokens, o.tokens) for s, o in zip(source, ours, strict=True)]
        self.lengths = [int(rng.integers(1, n + 1)) for n in tokens]
        per_token = [group.inner // group.cell_tokens for group in ours]
        self.prompt = [
            [rng.integers(0, 256, (n, g.heads, width * (1 if g.packed else g.cell_tokens)), dtype=np.uint8)
             for _ in range(g.layers)]
            for n, g, width in zip(tokens, ours, per_token, strict=True)
        ]  # fmt: skip
        free = rng.permutation(np.arange(1, self.blocks)).tolist()
        self.ids = [[free.pop() for _ in range(-(-n // g.tokens))] for n, g in zip(self.lengths, source, strict=True)]
        self.source = ranks_of(self.source_model, self._content(), *self.theirs, layout(rng))
        self.ours = ranks_of(self.model, self.blocks, *self.mine, layout(rng))
        for rank in self.source:
            for number, (ids, g, length) in enumerate(zip(self.ids, source, self.lengths, strict=True)):
                valid = [min(g.tokens, length - place * g.tokens) for place in range(len(ids))]
                batch = ChecksumJob(number, np.array(ids), keys_of(ids), np.array(valid, np.int32))
                assert rank.memory.compute_checksums([batch], None).done()
        free = rng.permutation(np.arange(1, self.blocks)).tolist()
        self.local = [[free.pop() for _ in range(-(-n // g.tokens))] for n, g in zip(self.lengths, ours, strict=True)]

    def _content(self):
        """As ``peer_caches.content``."""
        made = []
        for number, g in enumerate(self.source_model):
            cells = {(layer, part): np.zeros((self.blocks, g.heads, g.cells, g.inner), np.uint8)
                     for layer in range(g.layers) for part in range(g.parts)}  # fmt: skip
            for place, block in enumerate(self.ids[number]):
                for (layer, part), pages in cells.items():
                    pages[block] = self.page(number, g, layer, place, part)
            made.append(cells)
        return made

    def page(self, number: int, g: Group, layer: int, place: int, part: int) -> np.ndarray:
        """uint8 [heads, cells, inner]: a part of a block of the prompt; zeros beyond its end."""
        first = place * g.tokens + part * g.cells * g.cell_tokens
        kept = self.prompt[number][layer][first : first + g.cells * g.cell_tokens]
        count = g.cells * g.cell_tokens
        whole = np.zeros((count, *kept.shape[1:]), np.uint8)
        whole[: len(kept)] = kept
        if not g.packed:  # a cell is that of its first token
            return whole[:: g.cell_tokens].transpose(1, 0, 2)
        order = order_of_tokens(g)
        page = np.zeros((g.heads, g.inner // 2), np.uint16)
        for token in range(count):
            page[:, order[token]] = np.ascontiguousarray(whole[token]).view(np.uint16)
        return page.view(np.uint8)[:, None]

    def pulls(self, starts: list[int]) -> list[GroupPull]:
        """All of the prompt from block ``starts[group]`` of ours on."""
        found = []
        for number, (theirs, mine) in enumerate(zip(self.source_model, self.model, strict=True)):
            rows, s, b = [], theirs.tokens, mine.tokens
            for position in range(starts[number], len(self.local[number])):
                for place in range(position * b // s, -(-min((position + 1) * b, self.lengths[number]) // s)):
                    block, valid = self.ids[number][place], min(s, self.lengths[number] - place * s)
                    rows.append((self.local[number][position], block, valid, position * b - place * s))
            local, remote, valid, shifts = (np.array(column, np.int64) for column in zip(*rows, strict=True))
            order = self.rng.permutation(len(rows))
            pull = GroupPull(number, local, remote, keys_of(remote), valid.astype(np.int32), shifts.astype(np.int32))
            found.append(pull.rows(order))
            if s == b:
                found[-1].shifts = None
        return found

    def spoil(self) -> tuple[int, int, int]:
        """Flip a bit that counts on one rank of the source: (group, place of its block, rank)."""
        where = int(self.rng.integers(len(self.source)))
        rank, number = self.source[where], int(self.rng.integers(len(self.model)))
        place = int(self.rng.integers(len(self.ids[number])))
        g, length = self.source_model[number], self.lengths[number]
        valid = min(g.tokens, length - place * g.tokens)
        regions = [r for r in rank.view.groups[number].regions if r.first_token < valid]
        region = regions[self.rng.integers(len(regions))]
        cells = min(region.tokens, -(-(valid - region.first_token) // region.cell_tokens))
        at = [int(self.rng.integers(n)) for n in (region.outer, cells, region.inner)]
        rank.view.pages(region)[(self.ids[number][place], *at)] ^= 1 << int(self.rng.integers(8))
        return number, place, where

    def touched(self, number: int, place: int) -> set[int]:
        """Our blocks that have tokens of the source's block at this place."""
        s, b = self.source_model[number].tokens, self.model[number].tokens
        return {block for position, block in enumerate(self.local[number])
                if position * b < (place + 1) * s and (position + 1) * b > place * s}  # fmt: skip

    def check(self, rank_number: int, starts: list[int], bad: set[int]) -> None:
        """Our rank's blocks hold the prompt's tokens, and nothing else was written."""
        rank, (tp, stages) = self.ours[rank_number], self.mine
        stage, position = divmod(rank_number, tp)
        for number, g in enumerate(self.model):
            span = head_range(g, tp, position)
            layers = range(stage * g.layers // stages, (stage + 1) * g.layers // stages)
            names = [(layer, part) for layer in layers for part in range(g.parts)]
            assert len(names) == len(rank.view.groups[number].regions)
            for region, (layer, part) in zip(rank.view.groups[number].regions, names, strict=True):
                pages = rank.view.pages(region).numpy()
                for place, block in enumerate(self.local[number]):
                    if block in bad:
                        continue
                    want = self.page(number, g, layer, place, part)[span.first : span.first + held(g, tp)].copy()
                    self._cut(want, g, number, place, part)
                    if place < starts[number]:
                        want[:] = 0
                    assert np.array_equal(pages[block], want), (number, layer, part, place, self.larger, self.ratio)
                others = np.setdiff1d(np.arange(self.blocks), self.local[number])
                assert not pages[others].any()

    def _cut(self, page: np.ndarray, g: Group, number: int, place: int, part: int) -> None:
        """Clear what is beyond the prompt's end, if it is written cell by cell."""
        left = self.lengths[number] - place * g.tokens - part * g.cells * g.cell_tokens
        if not g.packed:
            page[:, max(0, -(-left // g.cell_tokens)) :] = 0
        elif self.source_model[number] != g:  # else whole cells go
            order = order_of_tokens(g)
            for token in range(max(0, left), g.cell_tokens):
                page[:, 0].view(np.uint16)[:, order[token]] = 0


def order_of_tokens(g: Group) -> np.ndarray:
    from vllm_kvtier.wire.geometry import Region

    region = Region("", 0, 0, 1, 0, 0, 1, 0, g.inner, g.cell_tokens, "shuffled", "uint8", separable=True)
    return shuffled(region).numpy()
