"""Messages of other processes that cannot be decoded."""

import msgspec
import pytest

from vllm_kvtier.remote_store import protocol as remote
from vllm_kvtier.store import protocol as store
from vllm_kvtier.wire import messages
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView


@pytest.mark.parametrize(
    "decode",
    [messages.decode_engine, store.decode_request, store.decode_reply, remote.decode_from_client,
     remote.decode_from_server],
)  # fmt: skip
def test_decode_error_does_not_repeat_what_the_sender_chose(decode):
    frame = msgspec.msgpack.encode({"type": "x\nkvtier: a line of its own\n" + "y" * (1 << 20)})
    with pytest.raises(msgspec.DecodeError) as raised:
        decode(frame)
    assert len(str(raised.value)) <= 1000 and "\n" not in str(raised.value)


@pytest.mark.parametrize("tokens", [16, 0, -16])
def test_blocks_of_no_tokens_are_malformed(tokens):
    """A process at an address that a client named may send any number: the scheduler's thread divides by it."""
    group = GroupView(0, tokens, "full", None, ())
    rank = messages.RankInfo(0, "agent", b"", "DRAM", 0, 100, (group,), CacheGeometry((), "little"), 0)
    frame = messages.encode(messages.Welcome(messages.PROTOCOL, "liar/1", [rank]))
    if tokens > 0:
        assert messages.decode_engine(frame).ranks == [rank]
    else:
        with pytest.raises(msgspec.DecodeError):
            messages.decode_engine(frame)
