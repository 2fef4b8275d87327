"""The jobs of one rank, and what vLLM hears of their ends."""

from pull_fakes import pull_of

from vllm_kvtier.jobs.results import PullResult
from vllm_kvtier.jobs.transfer_jobs import PullJob, StepWork
from vllm_kvtier.worker.job_table import JobTable


def part(table, blocks, more):
    job = PullJob("r", "p/1", [pull_of(blocks, blocks)], 1.0, more=more)
    table.submit(StepWork(1, pulls=[job]))
    return job


def test_of_a_load_that_lost_a_job_no_block_counts_as_read():
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


def test_a_lost_job_before_the_last_one_is_failed_with_its_load():
    table = JobTable()
    part(table, [1, 2], more=True)
    table.fail_lost(table.under_way(), known=set())
    assert not table.results().finished
    part(table, [3, 4], more=False)
    table.finish(PullResult("r", set(), False, "", 1, 0.1))
    out = table.results()
    assert out.finished == out.failed == {"r"} and out.bad_blocks == {1, 2}
