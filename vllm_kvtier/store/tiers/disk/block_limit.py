"""How many blocks the tables of a disk tier may list: as many as there is memory for."""

from collections.abc import Callable

from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

# Of memory, measured with Python 3.11 and 200,000 to 300,000 blocks: for each page of the disk, in the tier's process;
# for each block, 540 bytes in the store, 1,100 once as many were evicted, and 360 in the process.
PAGE_BYTES, BLOCK_BYTES, EVICTING_BYTES = 2, 1460, 560
# What the check of the start counts for each page of the disk: enough for blocks of 3 MB.
TABLE_BYTES = 4
RESTORED_BYTES = 300  # for each block found on the disk, of those 540: taken after the last one is there
STEP = 16 << 20  # bytes; memory is looked at as often


class BlockLimit:
    """Grows while memory is free. ``free``: bytes of memory that nothing else will take."""

    def __init__(self, pages: int, free: Callable[[], int]):
        self._limit, self._free = pages * (TABLE_BYTES - PAGE_BYTES) // BLOCK_BYTES, free
        self._logged = False

    def beyond(self, blocks: int, bytes_to_come: int = 0) -> int:
        """How many of so many blocks are too many. ``bytes_to_come``: of those that are listed already."""
        while blocks > self._limit and self._free() - bytes_to_come - blocks * EVICTING_BYTES >= STEP:
            self._limit += STEP // BLOCK_BYTES
        if blocks > self._limit and not self._logged:
            self._logged = True
            logger.warning(
                "kvtier: disk tier: no memory is free for tables of more than %d blocks: others are evicted for new "
                "ones, and some of the disk may stay unused; give the store %d bytes for each block",
                self._limit,
                BLOCK_BYTES,
            )
        return max(0, blocks - self._limit)
