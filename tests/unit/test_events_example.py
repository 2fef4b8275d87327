"""``examples/kv_events.py`` against vLLM's own publisher, and what its view makes of what it hears."""

import threading

import pytest
from node_events import example
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher


def stored(hashes, parent=None, tokens=None, medium="CPU", group=0, **fields):
    tokens = tokens or [token for each in hashes for token in (each, each)]
    return BlockStored(
        block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=2, lora_id=None, medium=medium,
        lora_name=None, group_idx=group, **fields,
    )  # fmt: skip


def batch(*events) -> KVEventBatch:
    return KVEventBatch(ts=0.0, events=list(events))


def test_events_example_view_reports_prefix_by_tier():
    view = example().View()
    view.hear(7, batch(stored([1, 2, 3]), stored([1, 2], medium="STORAGE"), stored([1], medium="GPU")))
    assert view.prefix([1, 1, 2, 2, 3, 3, 4], 2) == {"CPU": 6, "STORAGE": 4, "GPU": 2}
    assert view.prefix([1, 1, 9, 9, 3, 3], 2) == {"CPU": 2, "STORAGE": 2, "GPU": 2}
    view.hear(8, batch(BlockRemoved(block_hashes=[2], medium="CPU", group_idx=0), AllBlocksCleared()))
    assert view.prefix([1, 1, 2, 2, 3, 3], 2) == {"CPU": 2, "STORAGE": 4}
    assert set(view.blocks) == {"CPU", "STORAGE"} and view.missed == 0


@pytest.mark.parametrize(
    "end",
    [
        [BlockRemoved(block_hashes=[1, 2, 3], medium="CPU", group_idx=0), AllBlocksCleared()],
        [BlockRemoved(block_hashes=[1, 2, 3], medium="CPU", group_idx=None), AllBlocksCleared()],
        [AllBlocksCleared(), BlockRemoved(block_hashes=[3, 2, 1], medium="CPU", group_idx=0)],
        None,
    ],
)
def test_events_example_view_keeps_nothing_of_blocks_that_are_gone(end):
    """A router keeps a view for each engine, for as long as it runs."""
    view = example().View()
    view.hear(0, batch(stored([1, 2, 3]), stored([1, 2, 3], medium="GPU"), stored([2, 3], group=1, medium="GPU")))
    tokens = [1, 1, 2, 2, 3, 3]
    if end is None:
        view.hear(5, batch())  # a gap
    else:
        view.hear(1, batch(end[0]))
        assert sum(view.prefix(tokens, 2).values()) == 6, "they are in one tier still"
        view.hear(2, batch(end[1]))
    assert not any(view.blocks.values()) and not view._after and not view._keys
    view.hear(view._sequence + 1, batch(stored([1, 2, 3])))
    assert view.prefix(tokens, 2)["CPU"] == 6


@pytest.mark.skipif("locality" not in BlockStored.__struct_fields__, reason="this vLLM does not say where storage is")
def test_events_example_view_separates_remote_storage():
    view = example().View()
    view.hear(0, batch(stored([4], medium="STORAGE"), stored([4], medium="STORAGE", locality="REMOTE")))
    view.hear(1, batch(BlockRemoved(block_hashes=[4], medium="STORAGE", group_idx=0, locality="LOCAL")))
    assert view.prefix([4, 4], 2) == {"STORAGE": 0, "STORAGE (remote)": 2}


def test_salted_prompt_matches_only_same_salt():
    view = example().View()
    view.hear(0, batch(stored([1], extra_keys=[("a tenant",)]), stored([2], tokens=[1, 1], group=1)))
    assert view.prefix([1, 1], 2) == {"CPU": 0} and "CPU 2" in str(view)


@pytest.mark.parametrize("sequence", [2, 0])
def test_events_example_view_resets_after_sequence_gap(sequence):
    view = example().View()
    view.hear(0, batch(stored([1])))
    view.hear(sequence, batch(stored([5])))
    assert view.blocks == {"CPU": {(5, 0)}} and view.missed == 1


def test_events_example_script_prints_vllm_events(tmp_path, capsys):
    endpoint = f"ipc://{tmp_path}/events"
    publisher = ZmqEventPublisher(0, endpoint=endpoint, topic="kv@pod@model")
    args = [endpoint, "--topic", "kv@", "--batches", "3"]
    script = threading.Thread(target=example().main, args=(args,), daemon=True)
    try:
        script.start()
        while script.is_alive():  # what is published before it has subscribed it does not get
            publisher.publish(batch(stored([1, 2]), stored([1], medium="STORAGE")))
            script.join(0.05)
    finally:
        publisher.shutdown()
    assert capsys.readouterr().out.splitlines()[-1].endswith("CPU 2  STORAGE 1  (+3 -0)")
