"""Engines that send comments while they have nothing to say (vLLM's --sse-keep-alive-interval): these are no answer."""

import asyncio

import pytest
from proxy_fakes import Cluster, turn
from test_proxy_broken_answers import BODY, OPTIONS, STREAMS, probed

COMMENT = b": keep-alive\n\n"


@pytest.mark.parametrize("how", ["error", "breaks", "ends"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_engine_that_fails_behind_a_comment_is_replaced(path, how):
    async with Cluster(**OPTIONS, d=2) as c:
        fake, (_, spare) = c.d[0], c.core.decode
        fake.comments, fake.chunks, spare.weighted_picks = 0.01, 0, 1e9
        fake.stream_error = 500 if how == "error" else None
        fake.breaks, fake.ends = how == "breaks", how == "ends"
        reply = await c.client.post(path, json=BODY | {"prompt": "hello"})
        assert b"D1/" in reply.content and b"error" not in reply.content and b"abort" not in reply.content
        assert fake.commented and len(fake.seen) == len(c.d[1].seen) == 1
        assert c.core.state()["counts"]["decode_retries"] == 1 and "broken_streams" not in c.core.state()["counts"]


async def test_passed_through_stream_that_breaks_off_behind_a_comment_goes_to_another_engine():
    async with Cluster(**OPTIONS, d=2) as c:
        fake, (_, spare) = c.d[0], c.core.decode
        fake.comments, fake.chunks, fake.breaks, spare.weighted_picks = 0.01, 0, True, 1e9
        reply = await c.client.post("/v1/messages", json=BODY)
        assert b"D1/" in reply.content and b"failed" not in reply.content and fake.commented


async def test_refusal_behind_a_comment_is_the_client_s_and_releases_the_export():
    async with Cluster() as c:
        c.d[0].comments, c.d[0].stream_error = 0.01, 400
        assert (await c.chat("hello", stream=True)).status_code == 400
        assert (await asyncio.wait_for(c.released.get(), 10)).export.startswith("secret-export-P0")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_engine_that_sends_only_comments_is_late(path):
    async with Cluster(**OPTIONS, d=2, first_byte_timeout=0.2) as c:
        fake, (_, spare) = c.d[0], c.core.decode
        fake.comments, fake.gate, spare.weighted_picks = 0.02, asyncio.Semaphore(0), 1e9
        reply = await asyncio.wait_for(c.client.post(path, json=BODY), 10)
        assert b"D1/" in reply.content and b"failed" not in reply.content and fake.commented > 1
        await probed(c, fake)


@pytest.mark.parametrize("path", STREAMS)
async def test_comments_within_a_stream_are_silence_and_reach_the_client(path):
    async with Cluster(**OPTIONS, stream_idle_timeout=0.2) as c:
        (fake,) = c.d
        fake.comments, fake.gate = 0.02, asyncio.Semaphore(1)
        content = (await asyncio.wait_for(c.client.post(path, json=BODY), 10)).content
        assert content.startswith(b"data: ") and content.count(COMMENT) > 1 and b"failed" in content
        await probed(c, fake)


async def test_stream_with_pauses_is_whole():
    """Each is shorter than ``stream_idle_timeout``, all are longer."""
    async with Cluster(**OPTIONS, stream_idle_timeout=1.0) as c:
        (fake,) = c.d
        fake.comments, fake.gate, fake.chunks = 0.02, asyncio.Semaphore(0), 4
        asked = asyncio.create_task(c.client.post("/v1/chat/completions", json=BODY))
        for count in range(4):
            await c.until(lambda count=count: fake.commented >= 12 * (count + 1))
            fake.gate.release()
        reply = await asked
        assert reply.content.startswith(b"data: ") and reply.content.endswith(b"data: [DONE]\n\n")
        assert reply.content.count(b"D0/") == 4 and COMMENT in reply.content and b"failed" not in reply.content


async def test_followed_prefill_goes_on_while_its_decode_engine_sends_comments():
    async with Cluster(max_followed_prefills=16) as c:
        (prefill,), (decode,) = c.p, c.d
        prefill.follow = True
        await c.chat("first")
        prefill.hold, decode.gate, decode.comments = asyncio.Event(), asyncio.Semaphore(0), 0.02
        asked = asyncio.create_task(c.client.post("/v1/chat/completions", json=turn("hello", stream=True)))
        to_p = await prefill.until_seen(2)
        await c.until(lambda: decode.commented > 3)
        assert c.core.prefill[0].outstanding == 1 and c.core.decode[0].followed_prefills == 1
        prefill.hold.set()
        await c.until(lambda: c.core.prefill[0].outstanding == 0)
        for _ in range(decode.chunks):
            decode.gate.release()
        assert (await asked).content.endswith(b"data: [DONE]\n\n") and not to_p.aborted.is_set()
        counts = c.core.state()["counts"]
        assert counts["followed"] == 1 and counts["prefilled"] == 2 and "decoded_alone" not in counts
