"""A connector that changes what it loaded, after its checksum was found right: for negative controls of real engines.
Or, before that, what the store (or a pull) brought.

The environment variable KVTIER_ALTER names a file: "zero GROUP", or "exchange GROUP" for the content of the load (or
pull) before it if that was of as many blocks, or nothing. "flip GROUP" flips a bit of one of the blocks in the store,
just before it is copied, or of one that was pulled, just before it is verified. "drafts GROUP" zeroes the layers of
draft models only. On a GPU: all but "flip", of loads that are not synchronous (``sync_load_ms`` 0). Once any was
loaded, the file NAME.groups says how many groups there are. The engine needs this folder in PYTHONPATH:

    "kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"
"""

import os
import random
from pathlib import Path

import numpy as np
import torch
from faults import ALTER

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.wire.slots import PAGE
from vllm_kvtier.worker.copy.cuda_copier import CudaCopier, CudaCopy
from vllm_kvtier.worker.copy.host_copier import HostCopier
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.pulls import Pulls
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches

_load, _start, _poll, _check = HostCopier.load, Pulls.start, Pulls.poll, CacheMemory.begin_check
_cuda_load, _cuda_done, _result = CudaCopier.load, CudaCopy.done, PeerFetches._result
_random = random.Random("altering")
_jobs = {}  # pulls under way, by request
_before: dict[int, list[torch.Tensor]] = {}  # by group: the pages of the load before, by region


def _planned(group):
    """What to do with this group, or ""."""
    how, _, which = Path(os.environ[ALTER]).read_text().partition(" ")
    return how if which == str(group) else ""


def _flip(numbers):
    """One bit of a byte that is not 0."""
    numbers[_random.choice(np.flatnonzero(numbers).tolist())] ^= 1 << _random.randrange(8)


def _altered_load(self, group, blocks, keys, slots, after=None):
    if len(slots) and _planned(group) == "flip":
        layout, offset = self._parts[group]
        which = _random.randrange(len(layout.region_offsets))  # bytes between regions are padding
        start = int(_random.choice(slots)) * PAGE + offset + layout.region_offsets[which]
        _flip(self._words.view(np.uint8)[start : start + self._view.groups[group].regions[which].block_bytes])
    copy = _load(self, group, blocks, keys, slots, after)
    if len(blocks):
        _alter(self._view, group, blocks)
    return copy


def _followed_cuda_load(self, group, blocks, keys, slots, after=None):
    copy = _cuda_load(self, group, blocks, keys, slots, after)
    copy.to_alter = (self._view, group, np.array(blocks))
    return copy


def _altered_cuda_done(self):
    if not _cuda_done(self):
        return False
    view, group, blocks = self.__dict__.pop("to_alter", (None, 0, ()))
    if len(blocks):
        _alter(view, group, blocks)
    return True


def _altered_check(self, groups, moves=()):
    view = self.transfer_view
    for each in groups:
        if len(each.local) and _planned(each.group) == "flip":
            # The first cell: behind the last token of a prompt, a block's bytes are nothing.
            region, block = _random.choice(view.groups[each.group].regions), int(_random.choice(each.local))
            _flip(view.pages(region)[block, 0, 0].numpy())
    return _check(self, groups, moves)


def _followed_start(self, job, *args, **kwargs):
    _jobs[job.request_id] = job
    return _start(self, job, *args, **kwargs)


def _altered_result(self, fetch, number):
    result = _result(self, fetch, number)
    for each in [] if result.failed else fetch.jobs[number].groups:
        if len(each.local):
            _alter(self._view, each.group, each.local)
    return result


def _altered_poll(self, quick=False):
    results = _poll(self, quick)
    for result in results:
        for each in [] if result.failed else _jobs[result.request_id].groups:
            if len(each.local):
                _alter(self._memory.view, each.group, each.local)
    return results


def _alter(view, group, blocks):
    Path(f"{os.environ[ALTER]}.groups").write_text(str(len(view.groups)))
    ids, views = torch.from_numpy(blocks), [view.pages(r) for r in view.groups[group].regions]
    loaded = [pages[ids] for pages in views]
    how = _planned(group)
    for region, pages, other in zip(view.groups[group].regions, views, _before.get(group, loaded), strict=True):
        if how == "zero" or (how == "drafts" and region.layer.startswith("draft_model.")):
            pages[ids] = 0
        elif how == "exchange" and len(other) == len(ids):
            pages[ids] = other
    _before[group] = loaded
    if view.device.type == "cuda":
        torch.cuda.synchronize(view.device)  # the engine's stream does not wait for this thread's


class AlteringConnector(KVTierConnector):
    def __init__(self, *args, **kwargs):
        HostCopier.load, CacheMemory.begin_check = _altered_load, _altered_check
        CudaCopier.load, CudaCopy.done = _followed_cuda_load, _altered_cuda_done
        Pulls.start, Pulls.poll = _followed_start, _altered_poll
        PeerFetches._result = _altered_result
        super().__init__(*args, **kwargs)
