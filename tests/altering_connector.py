"""A connector that changes what it loaded, after its checksum was found right: for negative controls of real engines.

The environment variable KVTIER_ALTER names a file: "zero GROUP", or "exchange GROUP" for the content of the load before
it if that was of as many blocks, or nothing. The engine needs this folder in PYTHONPATH, and runs on a CPU:

    "kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"
"""

import os
from pathlib import Path

import torch

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.worker.copy.host_copier import HostCopier

VARIABLE = "KVTIER_ALTER"
_load = HostCopier.load
_before: dict[int, list[torch.Tensor]] = {}  # by group: the pages of the load before, by region


def _altered_load(self, group, blocks, keys, slots, after=None):
    copy = _load(self, group, blocks, keys, slots, after)
    if len(blocks):
        ids, views = torch.from_numpy(blocks), [self._view.pages(r) for r in self._view.groups[group].regions]
        loaded = [pages[ids] for pages in views]
        how, _, which = Path(os.environ[VARIABLE]).read_text().partition(" ")
        for pages, other in zip(views, _before.get(group, loaded), strict=True) if which == str(group) else ():
            if how == "zero":
                pages[ids] = 0
            elif len(other) == len(ids):
                pages[ids] = other
        _before[group] = loaded
    return copy


class AlteringConnector(KVTierConnector):
    def __init__(self, *args, **kwargs):
        HostCopier.load = _altered_load
        super().__init__(*args, **kwargs)
