"""The kernel between engines with blocks of different sizes, in the interpreter: what lands equals the plain model."""

import pytest
from block_sizes import BlockSizeCase
from test_peer_cuda_copier import SHAPE, IpcDriver, faked

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.worker.nixl_pull import staged_reads
from vllm_kvtier.worker.peer_fetch.base import CopyJob
from vllm_kvtier.worker.peer_fetch.cuda_copier import CudaPeerCopier


def copied(case, number):
    """What rank ``number`` of ours reports as bad after it copied all of the prompt."""
    rank = case.ours[number]
    with faked() as world:
        mappings = staged_reads._OwnDeviceMemory()
        copier = CudaPeerCopier(rank.view, rank.memory.table, SHAPE, driver=IpcDriver(), mappings=mappings)
        infos = [each.info for each in case.source]
        copier.add("s", map_source_ranks(rank.view.groups, rank.heads, number, infos))
        copy = copier.start([CopyJob("s", case.pulls([0] * len(case.model)))])
        world.run()
        assert copy.done() and not copy.why(0)
        copier.close()
        return copy.bad(0)


def cases(count, wanted):
    found = (c for c in (BlockSizeCase(seed, packed=False) for seed in range(1000)) if c.ratio > 1 and wanted(c))
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize("larger", [True, False])
@pytest.mark.parametrize("spoilt", [False, True])
def test_kernel_copies_blocks_of_other_sizes(larger, spoilt):
    for case in cases(2, lambda c: c.larger == larger and len(c.source) <= 2 and len(c.ours) <= 2):
        bad = case.touched(*case.spoil()[:2]) if spoilt else set()
        found = set()
        for number in range(len(case.ours)):
            mine = copied(case, number)
            case.check(number, [0] * len(case.model), mine)
            found |= mine
        assert found == bad


def test_kernel_refuses_packed_cells_of_other_sizes():
    case = next(c for c in map(BlockSizeCase, range(200)) if c.ratio > 1 and any(g.packed for g in c.model))
    with pytest.raises(KVTierError, match="hold several tokens in an order of their own"):
        copied(case, 0)
