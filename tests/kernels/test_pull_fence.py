"""A pull on a GPU waits for the step in flight, which may write the pull's blocks: NIXL knows no stream.

    python -m pytest -m gpu tests/kernels/test_pull_fence.py        # half a minute
"""

import pytest
import torch
from pull_fakes import cache_of_numbers
from worker_halves import Half, same

LONG = 1 << 32  # cycles of an SM: two seconds

pytestmark = pytest.mark.gpu


@pytest.fixture
def halves(tmp_path):
    """(reader, source); a first pull has compiled, loaded and connected what is needed."""
    pytest.importorskip("nixl")
    here, there = (Half(tmp_path, n, cache_of_numbers(16, n, "cuda")) for n in range(2))
    try:
        here.info()
        info = there.info()
        there.sum(3, 4)
        there.serve()
        here.pull("first", 1, 3, infos={"s/1": [info]})
        [result] = here.results()
        assert not result.failed and same(here, 1, there, 3), result.reason
        yield here, there
    finally:
        here.end()
        there.end()


def test_pull_with_step_in_flight_starts_after_that_step(halves):
    """Of a request that was aborted: the step writes its block, which is the pull's now, when it is not to any more."""
    here, there = halves
    ended = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    here.fill(7)
    ended.record()
    here.pull("r", 5, 4)
    looks, results = 0, []
    while not (results or here.reading()):
        results = here.made.collect().results
        looks += 1
    assert ended.query(), "it reads into what the step writes"
    assert looks > 10, "the step was over at once: this shows nothing"
    [result] = results or here.results()
    assert not result.failed, result.reason
    torch.cuda.synchronize()
    assert same(here, 5, there, 4)


def test_worker_after_suspend_is_pulled_from_again_on_gpu(halves):
    here, there = halves
    for life in range(2, 4):
        there.made.suspend()
        there.fill(3)
        here.pull("meanwhile", 2, 3, timeout=2.0)
        [result] = here.results()
        assert result.failed and result.bad_blocks == {2}
        there.made.resume()
        info = there.info(life)
        there.fill(life)
        there.sum(3, 4)
        here.pull("after", 2, 4, f"s/{life}", {f"s/{life}": [info]})
        [result] = here.results()
        assert not result.failed and same(here, 2, there, 4), result.reason
