"""Keys in 8 bits, values in 4: noise in keys costs about three times as much as the same noise in values."""

from vllm_kvtier.codecs.base import Codec
from vllm_kvtier.codecs.int8 import INT8, Int8
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.codecs.rot4 import ROT4

CODECS = (
    Codec(
        "k8v4",
        "keys as 8-bit integers, values in 4 bits after a rotation; MLA, whose latent is both, as int8",
        {"k": INT8, "v": ROT4, "latent": Int8(128), "rope": KEEP},
    ),
)
