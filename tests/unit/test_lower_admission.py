"""What each admission makes of a block that is stored, used and forgotten."""

import pytest

from vllm_kvtier.store.entries import Entry, Shape, Space
from vllm_kvtier.store.lower.admission import Reuse, admission


def entry(n: int, depth: int = 1) -> Entry:
    made = Entry(Space(b"s" * 16, 16, [Shape(1, None, 1)], 1), 0, n.to_bytes(16, "big"), None, 1, None, b"")
    made.depth = depth
    return made


def test_all():
    made = admission("all")
    assert made.stored(entry(1)) and made.used(entry(1))
    made.gone(entry(1))


def test_reuse_remembers_what_memory_forgot_up_to_a_number():
    made = Reuse(ghosts=2)
    assert not made.stored(entry(1)) and made.used(entry(1))
    for n in (1, 2, 3):
        made.gone(entry(n))
    assert not made.stored(entry(1))  # the oldest of three
    assert made.stored(entry(2)) and made.stored(entry(3))
    assert not made.stored(entry(3))  # once for each time it was forgotten


def test_the_least_length():
    made = admission("reuse", 64)
    assert not made.used(entry(1, 3)) and made.used(entry(1, 4))
    made.gone(entry(2, 3))
    assert not made.stored(entry(2, 3))
    made.gone(entry(3, 4))
    assert made.stored(entry(3, 4)) and not made.stored(entry(4, 4))


def test_unknown():
    with pytest.raises(KeyError):
        admission("never")
