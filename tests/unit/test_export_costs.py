"""What an export costs vLLM's scheduler thread: work for its blocks and for those that give way, however many stay.

Counted, without a clock, is how often a block id, a block hash or an export is looked at.
"""

import pytest

from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind

SIZE, PREFIX, OWN, OTHERS = 4, 4, 4, 200  # tokens a block; blocks that all have; blocks of each; exports of each kind
LOOKS_A_BLOCK = 12
KINDS = LeaseKind.RETAINED, LeaseKind.HANDOFF


class Counted:
    looks = 0

    def __hash__(self):
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other):
        Counted.looks += 1
        return super().__eq__(other)


class BlockId(Counted, int):
    pass


class BlockHash(Counted, bytes):
    pass


class CountedExport(Counted, Export):
    def __getattribute__(self, name):
        Counted.looks += 1
        return super().__getattribute__(name)


def export(number, kind, own=OWN):
    ids = [*range(PREFIX), *range(1000 * number, 1000 * number + own)]
    hashes = [BlockHash(b"%d" % i) for i in ids]
    ids = [BlockId(i + 1) for i in ids]
    groups = [GroupBlocks(SIZE, ids)]
    return CountedExport(f"{kind} {number} {own}", kind, len(ids) * SIZE, hashes, b"", b"", groups, list(ids), -1, 1e9)


def filled(room):
    """A table with ``OTHERS`` exports of each kind, and place for ``room`` more blocks of each."""
    table = ExportTable(SIZE, dict.fromkeys(LeaseKind, PREFIX + OTHERS * OWN + room))
    others = [export(1 + n * len(KINDS) + k, kind) for k, kind in enumerate(KINDS) for n in range(OTHERS)]
    assert all(table.add(each) for each in others) and table.room(KINDS[0]) == room
    return table, others


def looks(call):
    Counted.looks = 0
    call()
    return Counted.looks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("room", "own", "end"),
    [(2 * PREFIX + OWN, OWN, 0), (OWN, OWN, 0), (0, OWN, 1), (0, 20 * OWN, 20)],
    ids=["there is room", "there is room without the common blocks", "one gives way", "twenty give way"],
)
def test_added_export_costs_no_look_at_those_that_stay(kind, room, own, end):
    table, others = filled(room)
    count = looks(lambda: table.add(export(999, kind, own)))
    ended = [other for other in others if other.ended]
    assert ended == [other for other in others if other.kind is kind][:end]
    assert count <= LOOKS_A_BLOCK * (PREFIX + own + end * (PREFIX + OWN))


def test_next_turn_costs_no_look_at_other_conversations_behind_the_same_prompt():
    table, others = filled(2 * OWN + PREFIX)
    earlier = others[OTHERS // 2]
    turn = export(1 + OTHERS // 2 * len(KINDS), LeaseKind.RETAINED, 2 * OWN)
    count = looks(lambda: table.add(turn))
    assert [other for other in others if other.ended] == [earlier]
    assert count <= LOOKS_A_BLOCK * (len(turn.block_hashes) + len(earlier.block_hashes))


@pytest.mark.parametrize("kind", [LeaseKind.PEER_FETCH, LeaseKind.STRETCH])
def test_lease_of_cached_blocks_ends_without_a_look_at_the_others(kind):
    table = ExportTable(SIZE, dict.fromkeys(LeaseKind, 10_000))
    leases = [table.lease_cached(export(n + 1, kind), 0, "reader", 9.0, False) for n in range(OTHERS)]
    count = looks(lambda: table.release(leases[OTHERS // 2].id, "reader", done=True))
    assert table.room(kind) == 10_000 - PREFIX - (OTHERS - 1) * OWN
    assert count <= LOOKS_A_BLOCK * (PREFIX + OWN)


def test_lookup_that_finds_the_common_prompt_looks_at_one_export():
    table, _ = filled(0)
    hashes = [*export(1, LeaseKind.RETAINED).block_hashes[:PREFIX], BlockHash(b"own")]
    leased = []
    for call in (
        lambda: leased.append(table.lease_by_hashes(hashes, b"", 0, "reader", 9.0).tokens),
        lambda: leased.append(table.longest_prefix(hashes, b"")),
    ):
        assert looks(call) <= LOOKS_A_BLOCK * (PREFIX + 1)
    assert leased == [PREFIX * SIZE] * 2
