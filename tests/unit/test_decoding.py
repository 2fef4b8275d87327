"""Messages of other processes that cannot be decoded."""

import msgspec
import pytest

from vllm_kvtier.remote_store import protocol as remote
from vllm_kvtier.store import protocol as store
from vllm_kvtier.wire import messages


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
