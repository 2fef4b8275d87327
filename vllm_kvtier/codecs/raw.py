"""Byte for byte, in the layout of ``wire.slots``: no fields, no formats."""

from vllm_kvtier.codecs.base import Codec

CODECS = (Codec(Codec.RAW, "byte for byte"),)
