"""Decoding of messages from other processes."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

Message = TypeVar("Message")


def decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    """Decode one message. Raises msgspec.DecodeError for any malformed one."""
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError:
        raise
    except (RecursionError, ValueError, MemoryError) as error:  # msgspec lets these through; ValueError: not UTF-8
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None


def only(frames: Sequence[bytes]) -> bytes:
    """The frame of a ZMQ message that has one. Raises msgspec.DecodeError for any other message."""
    if len(frames) != 1:
        raise msgspec.DecodeError(f"{len(frames)} frames instead of one")
    return frames[0]
