"""The disk tier over a disk that crashes, tears, loses and reorders, fills up and fails: what was reported is there,
byte for byte, and nothing else is."""

import errno
import random
from collections import deque

import pytest
from disk_support import SHAPE, content_of, move_of, size_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_disk import Crash, SimDisk

from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk import journal
from vllm_kvtier.store.tiers.disk.process import DiskProcess
from vllm_kvtier.store.tiers.process import protocol as m

CAPACITY = 20  # pages of the disk
POOL = 40  # pages
BANKS = 1, 13  # where the blocks of a Write under way are
READS = 25  # where they are read to
OPTIONS = {"path": "/disk", "size": size_of(CAPACITY), "backend": "threads"}


@pytest.fixture(autouse=True)
def small_journal(monkeypatch):
    monkeypatch.setattr(journal, "_PREALLOCATED_BYTES", 2048)
    monkeypatch.setattr(journal, "REMOVAL_RESERVE_BYTES", 512)


class Pool:
    def __init__(self):
        self.nbytes = POOL * PAGE
        self.view = memoryview(bytearray(self.nbytes))


class Loop:
    """Host and threads in one: what is to be done is done in an order that the test decides."""

    def __init__(self, rng: random.Random):
        self.rng, self.pool, self.reactor = rng, Pool(), self
        self.soon: deque = deque()
        self.workers: list[Workers] = []
        self.said: list = []

    def call_soon(self, call):
        self.soon.append(call)

    def call_later(self, seconds, call):
        """Looks at the file system's room: no script lasts that long."""

    def guard(self, call):
        return call

    def fail(self, reason):
        raise AssertionError(reason)

    def send(self, message):
        m.decode_to_server(m.encode(message))
        self.said.append(message)

    def flush(self) -> None:
        """It is received at once."""

    def make_workers(self, name, threads):
        self.workers.append(Workers(self, threads))
        return self.workers[-1]

    def step(self) -> bool:
        able = [w for w in self.workers if w.jobs]
        if self.soon and (not able or self.rng.random() < 0.5):
            self.soon.popleft()()
        elif able:
            self.rng.choice(able).work()
        else:
            return False
        return True

    def settle(self):
        while self.step():
            pass


class Workers:
    def __init__(self, loop, threads):
        self.loop, self.threads, self.jobs = loop, threads, []

    def submit(self, job, done):
        self.jobs.append((job, done))

    def work(self):
        job, done = self.jobs.pop(self.loop.rng.randrange(len(self.jobs)) if self.threads > 1 else 0)
        result, error = None, None
        try:
            result = job()
        except OSError as failed:
            error = failed
        self.loop.soon.append(lambda: done(result, error))


class Server:
    """What the store knows: ``promised`` blocks are there; ``possible`` ones may be (not yet answered, failed, or
    given up without an answer); all others are not."""

    def __init__(self, seed: int, disk: SimDisk):
        self.rng, self.disk = random.Random(seed), disk
        self.promised: dict[int, m.Move] = {}
        self.possible: dict[bytes, m.Move] = {}
        self.number = 0

    def open(self, power_loss=False):
        self.loop = Loop(self.rng)
        self.tier_process = DiskProcess(
            self.loop,
            OPTIONS,
            files=self.disk,
            make_workers=self.loop.make_workers,
            min_log=self.rng.choice((0, 900)),
        )
        self.asked: dict[int, tuple[list[m.Move], set[bytes], int]] = {}
        self.given_up: list[int] = []
        self.given_names: set[bytes] = set()  # given up, and the tier process does not know
        self.told_names: set[bytes] = set()  # it does
        self.reads: dict[int, list[m.Move]] = {}
        self.last = 0
        return self.tier_process.open()

    # -- what it asks for ---------------------------------------------------------------------------------------

    def run(self, script):
        for word, amount in script:
            if not getattr(self, word)(amount):
                break
            for _ in range(self.rng.randint(0, 6)):
                self.loop.step()
            if not self.hear():
                return
        self.loop.settle()
        self.hear()

    def write(self, blocks) -> bool:
        # Slots are leased while they are written from.
        if len(self.asked) == len(BANKS):
            self.loop.settle()
            if not self.hear():
                return False
        bank = next(b for b in BANKS if b not in [bank for *_, bank in self.asked.values()])
        taken, moves, slot = set(), [], bank
        under_way = {
            p for moves, *_ in self.asked.values() for x in moves for p in range(x.position, x.position + x.pages)
        }
        gone = list(self.given_up)
        for _ in range(blocks):
            pages, position = self.rng.randint(1, 3), self.rng.randint(1, CAPACITY - 3)
            span = set(range(position, position + pages))
            if span & (taken | under_way):
                continue
            taken |= span
            for old in [x for x in self.promised.values() if span & set(range(x.position, x.position + x.pages))]:
                gone += self.give_up(old.position)
            self.number += 1
            parent = self.rng.choice([ZERO, *(x.hash for x in self.promised.values())])
            move = move_of(self.number, slot, pages, position, parent)
            self.loop.pool.view[slot * PAGE : (slot + pages) * PAGE] = content_of(move.hash, pages)
            moves.append(move)
            slot += pages
        self.given_up = []
        before = self.told_names | self.given_names
        if self.rng.random() < 0.1:  # a server that forgets: the tier process must not
            gone, before = [], set()
        else:
            self.told_names |= self.given_names
        self.given_names = set()
        self.last += 1
        self.asked[self.last] = (moves, before, bank)
        self.possible |= {x.hash: x for x in moves}
        self.tier_process.handle(m.Write(self.last, moves, gone, [SHAPE]))
        return True

    def give_up(self, position) -> list[int]:
        move = self.promised.pop(position)
        self.possible[move.hash] = move
        self.given_names.add(move.hash)
        return [position]

    def drop(self, amount) -> bool:
        positions = [p for p in list(self.promised) if self.rng.random() < 0.3][:amount]
        for position in positions:
            self.give_up(position)
        if self.rng.random() < 0.5:
            self.given_up += positions
        else:
            self.tier_process.handle(m.Drop(self.given_up + positions))
            self.told_names |= self.given_names
            self.given_up, self.given_names = [], set()
        return True

    def read(self, amount) -> bool:
        slot, moves = READS, []
        if self.reads:
            return True
        for move in self.rng.sample(list(self.promised.values()), min(amount, len(self.promised))):
            moves.append(move_of_read(move, slot))
            slot += move.pages
        if moves:
            self.last += 1
            self.reads[self.last] = moves
            self.tier_process.handle(m.Read(self.last, 0, moves))
        return True

    # -- what it hears ------------------------------------------------------------------------------------------

    def hear(self) -> bool:
        """False: the tier process wants to be opened again."""
        said, self.loop.said = self.loop.said, []
        for message in said:
            assert isinstance(message, m.Moved)
            if message.id in self.reads:
                self.hear_read(message, self.reads.pop(message.id))
                continue
            moves, before, _ = self.asked.pop(message.id)
            assert all(message.good) or self.disk.faults, message
            for move, good in zip(moves, message.good, strict=True):
                if good:
                    self.promised[move.position] = self.possible.pop(move.hash)
            if all(message.good) and moves:
                # What was given up before it was asked for is gone, once and for all.
                for name in before:
                    self.possible.pop(name, None)
            if not message.writable:
                assert self.disk.faults
                return False
        return True

    def hear_read(self, message, moves):
        for move, good in zip(moves, message.good, strict=True):
            if not good:  # given up meanwhile, or the disk failed
                assert (
                    self.disk.faults
                    or move.position not in self.promised
                    or self.promised[move.position].hash != move.hash
                )
            elif self.promised.get(move.position) and self.promised[move.position].hash == move.hash:
                assert self.reads_right(move), "a read brought wrong bytes"

    def name_at(self, position):
        return self.promised[position].hash if position in self.promised else None

    def reads_right(self, move) -> bool:
        data = self.loop.pool.view[move.slot * PAGE : (move.slot + move.pages) * PAGE]
        return bytes(data) == content_of(move.hash, move.pages)

    # -- after a crash ------------------------------------------------------------------------------------------

    def recover(self, power_loss: bool):
        self.disk.reboot(power_loss)
        opened = self.open()
        assert opened.writable, opened.note
        kept = [move for message in self.loop.said for move in message.moves]
        self.loop.said = []
        seen, used = set(), set()
        names = {move.hash for move in kept}
        for move in kept:
            known = self.possible.get(move.hash) or self.promised.get(move.position)
            assert known is not None and move_of_read(known, 0) == move, "what was never kept, or is gone, came back"
            assert move.parent not in names or move.parent in seen or move.parent == ZERO, "a child before its parent"
            seen.add(move.hash)
            span = set(range(move.position, move.position + move.pages))
            assert not span & used, "two blocks overlap"
            used |= span
        assert len(seen) == len(kept)
        assert {move.hash for move in self.promised.values()} <= seen, "a block that was promised is lost"
        for move in kept:
            wanted = move_of_read(move, READS)
            self.tier_process.handle(m.Read(1 << 30, 0, [wanted]))
            self.loop.settle()
            (answer,) = self.loop.said
            self.loop.said = []
            assert answer.good == [True] and self.reads_right(wanted), "a block that is listed is not there"
        self.promised, self.possible = {move.position: move for move in kept}, {}


def move_of_read(move: m.Move, slot: int) -> m.Move:
    return m.Move(move.namespace_id, move.group, move.hash, move.parent, move.tenant, slot, move.pages, move.position)


def attempt(script, seed, crash_at, fail) -> int:
    """One life, a crash, another life, another crash. How many operations the first had."""
    disk = SimDisk(seed)
    server = Server(seed, disk)
    lives = 0
    operations = 0
    disk.crash_at, disk.fail = crash_at, dict(fail)
    while lives < 2:
        disk.faults = 0
        try:
            opened = server.open() if not lives else None
            if opened is None or opened.writable:
                server.run(script)
        except Crash:
            pass
        except Exception as error:
            # What cannot even be opened on a failing disk says so.
            if type(error).__name__ != "KVTierError" or not disk.faults:
                raise
        operations = operations or disk.operations
        server.recover(power_loss=server.rng.random() < 0.8)
        lives += 1
        disk.crash_at = server.rng.randint(1, 60)
    return operations


SCRIPTS = st.lists(
    st.tuples(st.sampled_from(["write", "write", "write", "drop", "read"]), st.integers(1, 4)), min_size=3, max_size=9
)
QUICK = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True
)


@QUICK
@given(SCRIPTS, st.integers(0, 1 << 30))
def test_disk_tier_crash_at_any_operation_keeps_reported_blocks(script, seed):
    operations = attempt(script, seed, 0, {})
    for crash_at in range(1, operations + 1):
        attempt(script, seed, crash_at, {})


@QUICK
@given(SCRIPTS, st.integers(0, 1 << 30), st.sampled_from([errno.EIO, errno.ENOSPC, "short"]))
def test_disk_tier_fault_at_any_operation_keeps_reported_blocks(script, seed, fault):
    operations = attempt(script, seed, 0, {})
    rng = random.Random(seed)
    for failing in range(1, operations + 1):
        attempt(script, seed, rng.choice((0, failing + rng.randint(1, 20))), {failing: fault})
