"""Prompts with media: their placeholders are equal tokens, so that every hash of ours must contain the medium."""

import pytest
from support import make_request
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from vllm_kvtier.scheduler.integrity.checksum_index import ContentKeys
from vllm_kvtier.vllm_compat import requests as vr

SIZE, LENGTH = 4, 27  # three tokens in the last, partial block
TOKENS = list(range(100, 100 + LENGTH))
# (offset, length): within a block, over several, up to a block's end, over the partial one, in it, and up to the end.
PLACES = [(1, 2), (2, 9), (4, 4), (0, 27), (22, 4), (24, 2), (26, 1)]


def asked(offset: int, length: int, *images: str) -> Request:
    """A prompt with an image at ``offset``, and further ones right behind it."""
    media = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=image,
            mm_position=PlaceholderRange(offset=offset + i * length, length=length),
        )
        for i, image in enumerate(images)
    ]  # fmt: skip
    return make_request("r", TOKENS, SIZE, media=media)


def keys(request: Request) -> list[int]:
    """Of whole blocks in stores, in exports and in other engines, and of the partial tail."""
    assert len(request.block_hashes) == LENGTH // SIZE
    hashes = [*vr.block_hashes(request, LENGTH, SIZE), vr.tail_hash(request, LENGTH, SIZE)]
    return [ContentKeys(1).key(bytes(each), 0, b"") for each in hashes]


def digest(request: Request, tokens: int) -> bytes:
    """Of a hand-off of the first ``tokens`` tokens."""
    tail = vr.tail_hash(request, tokens, SIZE) if tokens % SIZE else b""
    return vr.prefix_digest(vr.block_hashes(request, tokens, SIZE), tail)


@pytest.mark.parametrize("place", PLACES)
def test_equal_prompts_with_other_images_share_only_what_is_before_them(place):
    cat, same, dog, none = asked(*place, "cat"), asked(*place, "cat"), asked(*place, "dog"), asked(*place)
    assert keys(cat) == keys(same), "a request with the same image hits"
    first = place[0] // SIZE
    for other in (dog, none):
        assert keys(cat)[:first] == keys(other)[:first]
        assert not set(keys(cat)[first:]) & set(keys(other)[first:]), "a block behind an image names all before it"
        for tokens in range(1, LENGTH + 1):
            assert (digest(cat, tokens) == digest(other, tokens)) == (tokens <= place[0]), tokens
    assert vr.is_plain(none) and not vr.is_plain(cat)


@pytest.mark.parametrize("place", [(1, 2), (22, 2)])
def test_second_image_of_a_block_is_part_of_its_hash(place):
    """Also in the partial tail, which we hash ourselves."""
    one, other = asked(*place, "cat", "dog"), asked(*place, "cat", "fox")
    first = (place[0] + place[1]) // SIZE
    assert keys(one)[:first] == keys(other)[:first] and not set(keys(one)[first:]) & set(keys(other)[first:])


def test_image_at_another_place_is_another_prompt():
    """Of one length, so that only the offset within the block tells."""
    assert not set(keys(asked(0, 2, "cat"))) & set(keys(asked(1, 2, "cat")))
    assert digest(asked(24, 1, "cat"), LENGTH) != digest(asked(25, 1, "cat"), LENGTH)
