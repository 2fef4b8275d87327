"""The jobs of one rank, and what vLLM gets when they end."""

from pull_fakes import pull_of

from vllm_kvtier.jobs.results import PullResult
from vllm_kvtier.jobs.transfer_jobs import PeerFetchJob, PullJob, StepWork
from vllm_kvtier.worker.job_table import JobTable


def part(table, blocks, more):
    job = PullJob("r", "p/1", [pull_of(blocks, blocks)], 1.0, more=more)
    table.submit(StepWork(1, pulls=[job]))
    return job


def test_load_in_parts_that_lost_one_reports_all_blocks_bad():
    """Which of its jobs it was is not known. vLLM would compute on blocks that nothing was read into."""
    table = JobTable()
    part(table, [1, 2], more=True)
    part(table, [3, 4], more=False)
    table.finish(PullResult("r", set(), False, "", 1, 0.1))  # of the second
    assert not table.results().finished
    table.fail_lost(table.under_way(), known=set())
    out = table.results()
    assert out.finished == out.failed == {"r"} and out.bad_blocks == {1, 2, 3, 4}
    assert not table.outstanding


def test_load_in_parts_that_lost_the_first_fails_with_the_last():
    table = JobTable()
    part(table, [1, 2], more=True)
    table.fail_lost(table.under_way(), known=set())
    assert not table.results().finished
    part(table, [3, 4], more=False)
    table.finish(PullResult("r", set(), False, "", 1, 0.1))
    out = table.results()
    assert out.finished == out.failed == {"r"} and out.bad_blocks == {1, 2}


def test_load_whose_last_part_is_synchronous_leaves_nothing_that_vllm_waits_for():
    table = JobTable()
    part(table, [1, 2], more=True)
    table.finish(PullResult("r", set(), False, "", 1, 0.1))
    assert not table.results().finished
    job = PeerFetchJob("r", "p/1", [pull_of([3, 4], [3, 4])], 1.0, synchronous=True)
    table.submit(StepWork(2, fetches=[job]))
    assert not table.outstanding and not table._parts
    out = table.results()
    assert [result.reason for result in out.results] == ["the copy was not begun before its step"]
    assert [result.bad_blocks for result in out.results] == [{3, 4}] and not (out.finished or out.bad_blocks)


def test_lost_jobs_are_those_that_were_listed():
    """One may end before it is looked for, and its request have another job by then: that one goes on."""
    table = JobTable()
    part(table, [1, 2], more=False)
    listed = table.under_way()
    table.finish(PullResult("r", set(), False, "", 1, 0.1))
    assert table.results().finished == {"r"}
    assert table.fail_lost(listed, known=set()) and not table.results().results
    part(table, [3, 4], more=False)
    assert not table.fail_lost(listed, known=set()), "the second may be lost: look again"
    assert not table.results().results and list(table.outstanding) == ["r"]
    assert table.fail_lost(table.under_way(), known=set())
    assert table.results().bad_blocks == {3, 4}


def test_part_that_ended_is_not_lost_in_place_of_the_next():
    table = JobTable()
    part(table, [1, 2], more=True)
    listed = table.under_way()
    table.finish(PullResult("r", set(), False, "", 1, 0.1))
    table.results()
    assert table.fail_lost(listed, known=set()) and not table.results().results
    part(table, [3, 4], more=False)
    assert not table.fail_lost(listed, known=set()) and not table.results().results
    table.finish(PullResult("r", set(), False, "", 1, 0.1))
    out = table.results()
    assert (out.finished, out.failed) == ({"r"}, set())
