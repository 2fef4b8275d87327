"""An engine's caches in a separate process, to be read, corrupted and killed: ``PeerProcess``."""

import multiprocessing
import time

import numpy as np
from peer_caches import Group, Layout, content, keys_of, ranks_of, sums_of

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob

# Processes are forked by one that has imported torch: importing takes most of a process's time.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["__main__", "vllm_kvtier.worker.nixl_pull.exported_memory"])


class PeerProcess:
    def __init__(self, model: tuple[Group, ...], seed, blocks, tp=1, stages=1, layout=None, checksums_ready=None):
        """All blocks but 0 have checksums unless ``checksums_ready`` says which."""
        self.content = content(model, seed, blocks)
        checksums_ready = list(range(1, blocks)) if checksums_ready is None else list(checksums_ready)
        self._link, theirs = FORKING.Pipe()
        given = (theirs, model, seed, blocks, tp, stages, layout or Layout(), checksums_ready)
        self.process = FORKING.Process(target=main, args=given)
        self.process.start()
        theirs.close()
        self.infos = self._link.recv()

    def poke(self, rank, group, region, block, outer=0, cell=0, byte=0):
        """Flip a bit of a page."""
        self._send("poke", rank, group, region, block, outer, cell, byte)

    def table(self, rank, block, change):
        """Add to a checksum."""
        self._send("table", rank, block, change)

    def storm(self, rank, block, seconds):
        """For so long, write something else to a block of group 0 and its checksum, and back; returns at once."""
        self._link.send(("storm", rank, block, seconds))

    def heard(self):
        assert self._link.recv() == "done"

    def _send(self, *words):
        self._link.send(words)
        self.heard()

    def kill(self):
        self.process.kill()
        self.process.join()

    def end(self):
        self.kill()
        self._link.close()


def main(link, model, seed, blocks, tp, stages, layout, checksums_ready):
    ranks = ranks_of(model, content(model, seed, blocks), tp, stages, layout)
    for rank in ranks:
        sums_of(rank, model, checksums_ready)
    link.send([rank.info for rank in ranks])
    while True:
        what, rank, *place = link.recv()
        view, table = ranks[rank].view, ranks[rank].memory.table
        if what == "poke":
            group, region, *cell = place
            view.pages(view.groups[group].regions[region])[tuple(cell)] ^= 16
        elif what == "storm":
            storm(ranks[rank], *place)
        else:
            table[place[0]] += place[1]
        link.send("done")


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
