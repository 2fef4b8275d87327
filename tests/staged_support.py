"""A rank that pulls through the ring from an engine of another shape, over a transport that copies in this process."""

import msgspec
import numpy as np
from peer_caches import Group, Layout, content, expected, pull_of, rank_of, ranks_of, sums_of
from pull_fakes import FakeTransport

from vllm_kvtier.jobs.transfer_jobs import PullJob
from vllm_kvtier.worker.nixl_pull.pulls import Pulls

MODEL = (Group(layers=3, heads=4), Group(layers=2, heads=1, kind="mla", inner=12))
BLOCKS = 16
EVEN = [2, 4, 6, 8, 10, 12, 14]  # of group 0, see ``sums_of``


class StagedPair:
    """Our rank 0 of 2, and a source of one rank and another layout."""

    def __init__(self, transport=None, agent="source", metadata=b"metadata", **source):
        self.content = content(MODEL, 1, BLOCKS)
        self.source = ranks_of(MODEL, self.content, **{"tp": 1, "layout": Layout(token=True, gap=(4, 0, 8)), **source})
        for rank in self.source:
            sums_of(rank, MODEL, range(1, BLOCKS))
        self.rank = rank_of(MODEL, BLOCKS, 0, 2)
        self.transport = transport or FakeTransport()
        self.pulls = Pulls(self.transport, self.rank.memory, 0, self.rank.heads)
        self.pulls.add_engine("s/1", self.infos(agent, metadata))

    def infos(self, agent="source", metadata=b"metadata"):
        return [
            msgspec.structs.replace(rank.info, agent=f"{agent} {n}", agent_metadata=metadata)
            for n, rank in enumerate(self.source)
        ]

    def start(self, local, remote, name="r", timeout=5.0, instance="s/1", **more):
        return self.pulls.start(PullJob(name, instance, [pull_of(local, remote, 4, **more)], timeout, staged=True))

    def run(self, rounds=1000):
        results = []
        for _ in range(rounds):
            results += self.pulls.poll()
            if not self.pulls.active:
                break
        return results

    def landed(self, local, remote):
        pages = [self.rank.view.pages(r)[local].numpy() for r in self.rank.view.groups[0].regions]
        wanted = expected(MODEL, self.content, self.rank, 0, 2, 1, 0, remote)
        return all(np.array_equal(a, b) for a, b in zip(pages, wanted, strict=True))

    @property
    def free_chunks(self):
        return len(self.pulls._staged.ring.free)
