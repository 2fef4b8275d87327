"""A connector that changes what it loaded, after its checksum was found right: for negative controls of real engines.

The environment variable KVTIER_ALTER names a file: "zero GROUP", or "exchange GROUP" for the content of the load (or
pull) before it if that was of as many blocks, or nothing. The engine needs this folder in PYTHONPATH, and a CPU:

    "kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"
"""

import os
from pathlib import Path

import torch

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.worker.copy.host_copier import HostCopier
from vllm_kvtier.worker.nixl_pull.pulls import Pulls

VARIABLE = "KVTIER_ALTER"
_load, _start, _poll = HostCopier.load, Pulls.start, Pulls.poll
_jobs = {}  # pulls under way, by request
_before: dict[int, list[torch.Tensor]] = {}  # by group: the pages of the load before, by region


def _altered_load(self, group, blocks, keys, slots, after=None):
    copy = _load(self, group, blocks, keys, slots, after)
    if len(blocks):
        _alter(self._view, group, blocks)
    return copy


def _followed_start(self, job, after=None):
    _jobs[job.request_id] = job
    return _start(self, job, after)


def _altered_poll(self, quick=False):
    results = _poll(self, quick)
    for result in results:
        for each in [] if result.failed else _jobs[result.request_id].groups:
            if len(each.local):
                _alter(self._memory.view, each.group, each.local)
    return results


def _alter(view, group, blocks):
    ids, views = torch.from_numpy(blocks), [view.pages(r) for r in view.groups[group].regions]
    loaded = [pages[ids] for pages in views]
    how, _, which = Path(os.environ[VARIABLE]).read_text().partition(" ")
    for pages, other in zip(views, _before.get(group, loaded), strict=True) if which == str(group) else ():
        if how == "zero":
            pages[ids] = 0
        elif len(other) == len(ids):
            pages[ids] = other
    _before[group] = loaded


class AlteringConnector(KVTierConnector):
    def __init__(self, *args, **kwargs):
        HostCopier.load, Pulls.start, Pulls.poll = _altered_load, _followed_start, _altered_poll
        super().__init__(*args, **kwargs)
