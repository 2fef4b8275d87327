"""Decoding of messages from other processes."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

Message = TypeVar("Message")

MAX_TEXT = 200  # characters of an error


def decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    """Decode one message. Raises msgspec.DecodeError for any malformed one; its text is short and one line, though
    msgspec repeats a tag that it does not know, as long as the sender made it."""
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError as error:
        text = str(error)
    except (RecursionError, ValueError, MemoryError) as error:  # msgspec lets these through; ValueError: not UTF-8
        text = f"{type(error).__name__}: {error}"
    raise msgspec.DecodeError(text[:MAX_TEXT].encode("unicode_escape").decode())


def only(frames: Sequence[bytes]) -> bytes:
    """The frame of a ZMQ message that has one. Raises msgspec.DecodeError for any other message."""
    if len(frames) != 1:
        raise msgspec.DecodeError(f"{len(frames)} frames instead of one")
    return frames[0]
