"""An engine's caches in a separate process, to be read, corrupted and killed: ``PeerProcess``."""

import json
import subprocess
import sys
import time
from dataclasses import asdict

import msgspec
import numpy as np
from peer_caches import Group, Layout, content, keys_of, ranks_of, sums_of

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob
from vllm_kvtier.wire.messages import RankInfo


class PeerProcess:
    def __init__(self, model, seed, blocks, tp=1, stages=1, layout=None, checksums_ready=None):
        """All blocks but 0 have checksums unless ``checksums_ready`` says which."""
        self.content = content(model, seed, blocks)
        checksums_ready = list(range(1, blocks)) if checksums_ready is None else list(checksums_ready)
        spec = dict(
            model=[asdict(g) for g in model], seed=seed, blocks=blocks, tp=tp, stages=stages,
            layout=asdict(layout or Layout()), checksums_ready=checksums_ready,
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        self.infos = msgspec.msgpack.decode(bytes.fromhex(line), type=list[RankInfo])

    def poke(self, rank, group, region, block, outer=0, cell=0, byte=0):
        """Flip a bit of a page."""
        self._send("poke", rank, group, region, block, outer, cell, byte)

    def table(self, rank, block, change):
        """Add to a checksum."""
        self._send("table", rank, block, change)

    def storm(self, rank, block, seconds):
        """For so long, write something else to a block of group 0 and its checksum, and back; returns at once."""
        print(json.dumps(("storm", rank, block, seconds)), file=self.process.stdin, flush=True)

    def heard(self):
        assert self.process.stdout.readline() == "done\n"

    def _send(self, *words):
        print(json.dumps(words), file=self.process.stdin, flush=True)
        self.heard()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main(spec):
    model = tuple(Group(**g) for g in spec["model"])
    layout = spec["layout"]
    layout["gap"] = tuple(layout["gap"])
    kept = content(model, spec["seed"], spec["blocks"])
    ranks = ranks_of(model, kept, spec["tp"], spec["stages"], Layout(**layout))
    for rank in ranks:
        sums_of(rank, model, spec["checksums_ready"])
    print(msgspec.msgpack.encode([rank.info for rank in ranks]).hex(), flush=True)
    for line in sys.stdin:
        what, rank, *place = json.loads(line)
        view, table = ranks[rank].view, ranks[rank].memory.table
        if what == "poke":
            group, region, *cell = place
            view.pages(view.groups[group].regions[region])[tuple(cell)] ^= 16
        elif what == "storm":
            storm(ranks[rank], *place)
        else:
            table[place[0]] += place[1]
        print("done", flush=True)


def storm(rank, block, seconds):
    group = rank.view.groups[0]
    pages = [rank.view.pages(region)[block] for region in group.regions]
    contents = [[page.clone() for page in pages], [page.clone() ^ 255 for page in pages]]
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until or turn:
        turn ^= 1
        for page, new in zip(pages, contents[turn], strict=True):
            page.copy_(new)
        batch = ChecksumJob(
            0, np.array([block]), keys_of([block + 1000 * turn]), np.full(1, group.block_tokens, np.int32)
        )
        rank.memory.compute_checksums([batch], None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
