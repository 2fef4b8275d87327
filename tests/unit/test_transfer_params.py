"""``kv_transfer_params`` come from clients: nothing they hold may raise, and what is malformed counts as absent."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import make_request
from test_engine_thread import BLOCK, KVTIER, engine, kvtier  # noqa: F401
from vllm.v1.request import RequestStatus

from vllm_kvtier.scheduler.leases.exports import Export, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.matching import transfer_params
from vllm_kvtier.scheduler.matching.transfer_params import (
    MAX_PEERS,
    MIN_EXPIRES_IN,
    EarlyReadInfo,
    Hints,
    PrefillHandoff,
    read,
    report,
    write,
    write_report,
)
from vllm_kvtier.store.protocol import Lookup, decode_request, encode

FIELDS = [
    "do_remote_prefill", "do_remote_decode", "remote_host", "remote_port", "remote_request_id", "kvtier",
    "remote_decoder", "remote_prefiller", "remote_kv_source", "kv_hint",
]  # fmt: skip
OURS = ["export", "sources", "stores", "host", "port", "v"]

HANDOFF = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_request_id": "kvtier/r",
    "remote_host": "10.1.2.3", "remote_port": "5600", "remote_block_ids": [[1]], "tp_size": 1,
}  # fmt: skip
NIXL_V2 = {  # what llm-d's sidecar and Dynamo send (/docs/guides/llm-d.md, dynamo.md)
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["kvtier/e", "²", "9" * 5000, "٣", "-1", "80", "65536", "127.0.0.1", "a b", "\x00", "\ud800"]),
    lambda inner: st.lists(inner, max_size=10)
    | st.dictionaries(st.sampled_from(FIELDS + OURS) | st.text(max_size=3), inner, max_size=6),
    max_leaves=20,
)
shaped = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(FIELDS, json_values),
        "kvtier": json_values
        | st.fixed_dictionaries(
            {},
            optional={
                "export": json_values,
                "sources": st.lists(st.fixed_dictionaries({}, optional={"host": json_values, "port": json_values})),
            },
        ),
    },
)


@given(shaped | json_values)
def test_transfer_params_any_value_does_not_raise(params):
    hints = read(params)
    addresses = [*hints.peers, *([hints.handoff.address] if hints.handoff else [])]
    assert len(hints.peers) <= MAX_PEERS + 1
    for host, port in addresses:
        f"tcp://{host}:{port}".encode("ascii")  # what ZMQ will be given
        assert type(port) is int and 0 < port < 65536
        assert not set(host) & set(" ;/\x00\n*@|")
    if hints.handoff:
        assert 0 < len(hints.handoff.export) <= 512
        hints.handoff.export.encode()


@pytest.mark.parametrize("port", ["²", "9" * 5000, 0, 65536, -1, True, 80.0, None, "", " 80"])
def test_transfer_params_invalid_port_is_absent(port):
    assert read({**HANDOFF, "remote_host": "127.0.0.1", "remote_port": port}) == Hints(asked=True)


def test_transfer_params_with_nixl_names_only_are_read():
    """Routers may copy the fields that they know, and drop ``kvtier``."""
    assert read(HANDOFF) == Hints(handoff=PrefillHandoff(("10.1.2.3", 5600), "r"), asked=True)
    assert read({"do_remote_decode": True, "remote_host": None, "remote_port": None}) == Hints(
        export_prefill=True, asked=True
    )
    for host in ("localhost", "node-7.cluster.local", "::1", "[fe80::1]", "fe80::1%eth0"):
        assert read({**HANDOFF, **NIXL_V2, "remote_host": host, "remote_port": 1}).peers == ((host, 1),)


def test_transfer_params_of_a_request_are_read_once_and_their_block_ids_for_an_early_read_only(engine, monkeypatch):  # noqa: F811
    """They are a long prompt's: each look at all of them costs vLLM's scheduler thread half a millisecond."""
    read_of, looked = [], []
    monkeypatch.setattr(transfer_params, "_early_read_info", lambda *_: read_of.append(1))
    monkeypatch.setattr(EarlyReadInfo, "block_ids", lambda self: looked.append(1))
    core = engine(KVTIER)
    kvtier(core)._scheduler._engine.look_at(core)
    core.scheduler.add_request(make_request("r", list(range(90)), BLOCK, params=HANDOFF))
    for _ in range(3):
        core.scheduler.schedule()
    core.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert (read_of, looked) == ([1], [])


@pytest.mark.parametrize("name", ["r", "", "kvtier", "kvtier/", 7, None, ["kvtier/r"]])
@pytest.mark.parametrize("ours", [{}, {"kvtier": {"v": 1, "prompt_tokens": 9}}, {"kvtier": {"export": 7}}])
def test_transfer_params_that_name_no_export_of_ours_name_no_address(name, ours):
    """A message of ours ends the thread of NixlConnector that answers there. Its engine may have ours beside it."""
    params = {**HANDOFF, "remote_request_id": name, **ours}
    assert read(params) == Hints(asked=True)
    assert read({**params, "do_remote_prefill": False, "do_remote_decode": True}) == Hints(
        export_prefill=True, asked=True
    )


def test_transfer_params_round_trip():
    blocks = [GroupBlocks(16, [1, 2])]
    export = Export("x", LeaseKind.HANDOFF, 33, [], b"\x01\x02", b"", blocks, [], ready_step=0, deadline=0.0)
    written = write(export, "e", "e/1", ("h", 7), 30.0, 1, report(33, 0, 0, None))
    written = json.loads(json.dumps(written))
    assert read(written) == Hints(handoff=PrefillHandoff(("h", 7), "x"), asked=True)
    assert read({k: v for k, v in written.items() if k != "kvtier"}) == read(written), "routers may drop ours"
    assert read(written).handoff.expires_in == 30.0
    bad = [(value, math.inf) for value in (0, -1.0, math.nan, True, "8", None, [8])]
    for seconds, kept in [(0.001, MIN_EXPIRES_IN), (10**400, 10**400), *bad]:
        assert read({**written, "kvtier": {**written["kvtier"], "expires_in": seconds}}).handoff.expires_in == kept
    assert read(written).handoff.early_read == EarlyReadInfo("e/1", 33, b"\x01\x02", [[1, 2]])
    assert read(written).handoff.early_read.block_ids() == [[1, 2]]
    for broken in ([[1, "2"]], [[-1]], [[True]], [7]):
        assert read({**written, "remote_block_ids": broken}).handoff.early_read.block_ids() is None
    for broken in (7, None):
        assert read({**written, "remote_block_ids": broken}).handoff.early_read is None
    turned = {**written, "do_remote_prefill": False, "do_remote_decode": True}  # vLLM's multi-turn proxy does this
    assert read(turned) == Hints(peers=(("h", 7),), export_prefill=True, asked=True)
    assert read(write_report(report(33, 16, 16, "h:7"))) == Hints(asked=True)
    assert write_report(report(33, 16, 16, "h:7"))["kvtier"]["computed_tokens"] == 1


@pytest.mark.parametrize(
    "listed, taken",
    [
        (["10.0.0.2:7200", "node-3:7200"], ("10.0.0.2:7200", "node-3:7200")),
        (["10.0.0.2", 5, None, "a:b", "x:0", "*:7200", ":7200"], ()),
        ("10.0.0.2:7200", ()),
        ([f"n{i}:7200" for i in range(20)], tuple(f"n{i}:7200" for i in range(MAX_PEERS))),
    ],
)
def test_transfer_params_name_remote_stores(listed, taken):
    assert read({"kvtier": {"stores": listed}}).stores == taken


def test_transfer_params_name_no_store_by_what_is_no_text():
    """Nor is that made text: a client's nested lists end in an error, and large ones take long."""
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert read({"kvtier": {"stores": [nested, "node-3:7200"]}}).stores == ("node-3:7200",)


def test_transfer_params_name_only_stores_that_the_node_store_accepts():
    """It disconnects an engine that sends an invalid message: no request may bring that about."""
    listed = [f"{'n' * length}:{port}" for length in (1, 250, 251, 255) for port in (7, 65535)]
    stores = read({"kvtier": {"stores": listed}}).stores
    assert stores == tuple(listed[:5]), "those of at most 256 characters"
    lookup = Lookup(1, bytes(16), bytes(16), 0, 1, nodes=list(stores))
    assert decode_request(encode(lookup)) == lookup


DECODER = {"remote_decoder": {"kv_request_id": "4b2f"}}
PEER = {"kv_request_id": "4b2f", "remote_host": "10.0.0.7", "remote_port": 7777}


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (NIXL_V2, Hints(export_prefill=True, asked=True)),
        ({**NIXL_V2, "remote_kv_source": PEER}, Hints(export_prefill=True, asked=True)),
        ({**NIXL_V2, "kv_hint": {"type": "transfer", "source_control_endpoint": "tcp://10.0.0.7:5600"}},
         Hints(export_prefill=True, asked=True)),
        (DECODER, Hints(asked=True)),
        ({"remote_prefiller": PEER}, Hints(asked=True)),
        ({**DECODER, "remote_kv_source": PEER}, Hints(asked=True)),
        ({"remote_kv_source": PEER}, Hints(asked=True)),
        ({"remote_decoder": None, "remote_prefiller": [], "remote_kv_source": 7}, Hints(asked=True)),
        ({"kv_hint": {"type": "transfer"}}, Hints(asked=True)),
        ({}, Hints(asked=True)),
    ],
)  # fmt: skip
def test_transfer_params_of_llm_d_and_dynamo(params, hints):
    """The peers that they name speak another connector's protocol: no address of theirs is used."""
    assert read(params) == hints
