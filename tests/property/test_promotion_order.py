"""The order of promotions, against a plain model: those that lookups wait for first, one after the other. The time
that a lookup is to expect of its promotion is what it takes."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_promotion import ENGINE, EVERYTHING, FakeTier, World, block_hashes_of, small_chunks  # noqa: F401

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.tiers.base import Find
from vllm_kvtier.store.tiers.promotion_queue import num_bytes
from vllm_kvtier.store.tiers.tier_stack import TierStack
from vllm_kvtier.wire.slots import PAGE

CHUNK = 4  # blocks of a page, as in small_chunks
WINDOW = 2 * CHUNK
RATE = 1e6  # bytes/s of FakeTier


class Device(FakeTier):
    """Reads one chunk after the other."""

    def __init__(self):
        super().__init__("disk")
        self.order: list[str] = []

    def read(self, find, blocks, done):
        self.order.append(find.want.block_hashes[:HASH_BYTES].rstrip(b"\0").decode().removesuffix("-0"))
        super().read(find, blocks, done)


class Burst:
    def __init__(self):
        self.device = Device()
        self.world = World(self.device, pages=4000)
        self.jobs, self.ended = [], {}

    def start(self, size: int):
        block_hashes = block_hashes_of(f"{len(self.jobs)}-", size)
        self.device.num_hash_blocks[block_hashes[:HASH_BYTES]] = size
        self.jobs.append(self.world.ahead(block_hashes))
        return self.jobs[-1]

    def wait(self, job, seconds: float = 1e6):
        return self.world.promotion.wait(job, seconds, lambda: self.ended.setdefault(job, self.world.clock.now))

    def arrive(self) -> None:
        if self.device.reads:
            self.world.clock.pass_(num_bytes(self.device.reads[0][0]) / RATE)
            self.device.finish()

    def expected(self, job) -> float:
        return self.world.clock.now + self.world.promotion.expected(job).seconds


@dataclass
class Model:
    """A job: ``rest`` in blocks; since when it is waited for, else when it came."""

    name: str
    rest: int
    order: int
    waits: bool = False

    def rank(self):
        return not self.waits, self.rest > CHUNK, self.order


def modelled(jobs: list[Model], in_flight: list[int], order: list[str]) -> None:
    while sum(in_flight) < WINDOW and any(job.rest for job in jobs):
        job = min((job for job in jobs if job.rest), key=Model.rank)
        in_flight.append(min(CHUNK, job.rest))
        job.rest -= in_flight[-1]
        order.append(job.name)


EVENTS = st.lists(
    st.tuples(st.just("start"), st.integers(1, 24))
    | st.tuples(st.sampled_from(["wait", "leave"]), st.integers(0, 9))
    | st.tuples(st.just("arrive"), st.just(0)),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_promotions_go_on_in_the_order_in_which_lookups_began_to_wait(events):
    burst, jobs, in_flight, order, waiters = Burst(), [], [], [], {}
    for clock, (event, number) in enumerate([*events, *[("arrive", 0)] * 400]):
        if event == "start":
            jobs.append(Model(str(len(jobs)), number, clock))
            burst.start(number)
        elif event == "wait" and number < len(jobs) and not burst.jobs[number].over and number not in waiters:
            waiters[number] = burst.wait(burst.jobs[number])
            jobs[number].waits, jobs[number].order = True, clock
        elif event == "leave" and number in waiters:
            waiters.pop(number).cancel()
            jobs[number].waits = False
        elif event == "arrive" and in_flight:
            in_flight.pop(0)
            burst.arrive()
        modelled(jobs, in_flight, order)
        assert burst.device.order == order
    assert all(job.over for job in burst.jobs) and burst.world.quiet() and not in_flight


@given(EVENTS, st.lists(st.integers(1, 24), max_size=5), st.integers(1, 24))
@settings(max_examples=200, deadline=None)
def test_promotion_takes_as_long_as_expected_despite_later_ones(events, later, size):
    """Except for short ones that lookups wait for: each adds its own time."""
    burst = Burst()
    for event, number in events:
        if event == "start":
            burst.start(number)
        elif event == "wait" and number < len(burst.jobs) and not burst.jobs[number].over:
            burst.wait(burst.jobs[number])
        elif event == "arrive":
            burst.arrive()
    job = burst.start(size)
    expected = burst.expected(job)
    burst.wait(job)
    short = 0
    for number in later:
        burst.wait(burst.start(number))
        short += number if number <= CHUNK < size else 0
        burst.arrive()
    while burst.device.reads:
        burst.arrive()
    assert expected - 1e-9 <= burst.ended[job] <= expected + short * PAGE / RATE + 1e-9
    if not later:
        assert burst.ended[job] == pytest.approx(expected)


def test_promotion_for_a_waiting_lookup_does_not_wait_for_those_of_requests_that_will_come():
    """24 prompts are promoted ahead of their turn when one is due."""
    burst = Burst()
    ahead = [burst.start(100) for _ in range(24)]
    due = burst.start(16)
    assert burst.expected(due) == pytest.approx((WINDOW + 16) * PAGE / RATE)
    burst.wait(due)
    while burst.device.reads:
        burst.arrive()
        if ahead[0].over:
            burst.ended.setdefault(ahead[0], burst.world.clock.now)
    assert burst.ended[due] == pytest.approx((WINDOW + 16) * PAGE / RATE)
    # It is not read together with the others.
    assert burst.ended[ahead[0]] == pytest.approx((16 + 100) * PAGE / RATE, rel=0.1)


def test_promotion_of_requests_that_will_come_does_not_evict_its_own():
    """Of a burst beyond memory's size the first are promoted; the others when they are due."""
    device = FakeTier("disk")
    world = World(device, pages=400)
    stack, prompts = TierStack(world.index, [device], None, world.promotion), []
    for number in range(24):
        prompts.append(block_hashes := block_hashes_of(f"{number}-", 50))
        device.num_hash_blocks[block_hashes[:HASH_BYTES]] = 50
        stack.prefetch(world.want(block_hashes), EVERYTHING)
    answers = []
    stack.lookup(ENGINE, world.want(prompts[-1]), EVERYTHING, 9.0, lambda found, more: answers.append(found))
    while device.reads:
        device.finish()
    assert [world.here(prompt) for prompt in prompts] == [50] * 5 + [0] * 18 + [50]
    assert answers[0].num_hash_blocks == 50


def test_promotion_from_a_hung_source_delays_no_other():
    """Another node that hangs holds its reads for a minute."""
    nodes = FakeTier("nodes")
    world = World(nodes, pages=1000)
    hung, good = [block_hashes_of(f"{i}-", 40) for i in range(3)], block_hashes_of("good", 12)
    for block_hashes in [*hung, good]:
        nodes.num_hash_blocks[block_hashes[:HASH_BYTES]] = len(block_hashes) // HASH_BYTES
    answer = nodes._answer
    nodes._answer = lambda want, done: answer(want, lambda find: done(_from(str(want.block_hashes in hung), find)))
    for block_hashes in hung:
        world.promotion.wait(world.ahead(block_hashes), 9.0, lambda: None)
    job = world.ahead(good)
    while not job.over:
        nodes.finish(next(i for i, (blocks, _) in enumerate(nodes.reads) if blocks[0].hash.startswith(b"good")))
    assert world.here(good) == 12 and len(nodes.reads) == 2


def _from(source: str, find: Find) -> Find:
    find.source = source
    return find
