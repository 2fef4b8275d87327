"""Pulls of one transfer and of many, begun and polled in any order; any transfer may go wrong at any time."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pull_fakes import LAYERS, Pair, batch_of, pull_of, split_reads
from support import WITHOUT_SHRINKING

from vllm_kvtier.worker.nixl_pull import pulls as pulls_module

PULLS, BLOCKS = 6, 12  # and blocks of each
FAULTS = st.sampled_from([None] * 12 + ["fails", "never", "start", "corrupt"])


def writable(pair) -> set[int]:
    """Blocks that a transfer may still write."""
    views = pair.here.view.groups[0].regions
    found = set()
    for transfer in pair.transport.running + pair.transport.unended:
        for (to, _), _ in transfer.handle.pairs if transfer.handle.agent > pair.transport.ended else ():
            found |= {(to - r.base) // r.block_stride for r in views if 0 <= to - r.base < r.block_stride * 1000}
    return found


@given(st.data())
@settings(max_examples=150, phases=WITHOUT_SHRINKING, deadline=None)
def test_pulls_are_reported_when_nothing_can_be_written(data):
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(now=100.0)
        patch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        split_reads(patch, data.draw(st.sampled_from([1, LAYERS + 1, 3 * LAYERS + 1, 1000])))
        pair = Pair(blocks=(PULLS * BLOCKS + 1, 2 * PULLS * BLOCKS + 2))
        pair.transport.close = lambda: None
        pair.there.compute_checksums([batch_of(range(1, 2 * PULLS * BLOCKS + 2))], None)
        results, begun = {}, {}

        def take(result):
            assert result.request_id not in results
            pull, results[result.request_id] = begun[result.request_id], result
            ids = set(pull.local.tolist())
            assert not ids & writable(pair) and result.bad_blocks <= ids and bool(result.bad_blocks) == result.failed
            for here, there in zip(pull.local.tolist(), pull.remote.tolist(), strict=True):
                assert here in result.bad_blocks or pair.equal(here, there)
            whole = len(ids) * (pair.here.view.groups[0].block_bytes + 8)
            assert result.bytes <= whole and (result.failed or result.bytes == whole)

        for number in range(PULLS):
            blocks, scattered = data.draw(st.integers(1, BLOCKS)), data.draw(st.booleans())
            local = [1 + number * BLOCKS + n for n in range(blocks)]
            remote = [1 + (number * BLOCKS + n) * (2 if scattered else 1) for n in range(blocks)]
            pull = begun[str(number)] = pull_of(local, remote)
            pair.transport.fault, pair.transport.polls = data.draw(FAULTS), data.draw(st.integers(0, 3))
            order = pair.order(pull, name=str(number), timeout=data.draw(st.sampled_from([0.3, 5.0])))
            result = pair.pulls.start(order, quick=data.draw(st.booleans()))
            if result is not None:
                take(result)
            for _ in range(data.draw(st.integers(0, 4))):
                pair.transport.fault, pair.transport.refuse_end = data.draw(FAULTS), data.draw(st.integers(0, 1))
                clock.now += 0.05
                for result in pair.pulls.poll(quick=data.draw(st.booleans())):
                    take(result)
        for result in pair.pulls.stop("asleep") if data.draw(st.booleans()) else ():
            take(result)
        pair.transport.fault, pair.transport.refuse_end = None, 0
        for _ in range(400):
            clock.now += 0.05
            for result in pair.pulls.poll():
                take(result)
        assert set(results) == set(begun) and not pair.pulls.active and not pair.transport.running
