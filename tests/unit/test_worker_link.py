"""How a worker of an engine over several nodes finds the scheduler side. See also ``test_reactor_link``."""

from types import SimpleNamespace

import pytest

from vllm_kvtier import connector
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.link import LinkPlace

HERE = connector.node_name()
ELSEWHERE = ("another node", "/its/path", "tcp://192.0.2.7:1234")


@pytest.fixture
def key_file(tmp_path):
    ClusterKey.create(str(tmp_path / "key"))
    return str(tmp_path / "key")


def find(monkeypatch, rank=1, key_file=None, unsupported=None, host="127.0.0.1", first=None):
    """(the link, what this rank offered). ``first``: what the first rank does, if that is another one."""
    offers = []
    monkeypatch.setattr(connector, "rank_in_engine", lambda: rank)
    monkeypatch.setattr(connector, "from_first_rank", lambda offer: offers.append(offer) or first or offer)
    options = SimpleNamespace(cluster_key_file=key_file, endpoint_host=host, advertise_host=None)
    this = SimpleNamespace(_options=options, _info=SimpleNamespace(unsupported=unsupported), _link="/path", _relay=None)
    this._open_relay = lambda key: KVTierConnector._open_relay(this, key)
    try:
        link = KVTierConnector._find_link(this)
    finally:
        assert len(offers) == 1  # each rank comes to the collective
        if this._relay is not None:
            this._relay.shutdown()
    return link, offers[0]


def test_first_rank_relays_with_a_key(monkeypatch, key_file):
    link, (node, path, relay) = find(monkeypatch, 0, key_file)
    assert link == LinkPlace("/path") and (node, path) == (HERE, "/path") and relay.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.1"])  # the second is no address of this machine
def test_first_rank_without_relay_serves_its_own_node(monkeypatch, key_file, host):
    key = key_file if host != "127.0.0.1" else None
    assert find(monkeypatch, 0, key, host=host) == (LinkPlace("/path"), (HERE, "/path", ""))


def test_rank_on_the_first_ones_node_has_its_path(monkeypatch):
    assert find(monkeypatch, first=(HERE, "/its/path", ""))[0] == LinkPlace("/its/path")


def test_rank_on_another_node_has_the_relay(monkeypatch, key_file):
    link, _ = find(monkeypatch, key_file=key_file, first=ELSEWHERE)
    assert link.endpoint == ELSEWHERE[2] and link.key is not None


def test_rank_without_a_way_says_why(monkeypatch, key_file, caplog):
    assert find(monkeypatch, first=ELSEWHERE)[0] is None
    assert find(monkeypatch, key_file=key_file, first=(*ELSEWHERE[:2], ""))[0] is None
    assert caplog.text.count("needs cluster_key_file on each of them") == 2


def test_rank_that_cannot_be_set_up_does_not_keep_the_others_waiting(monkeypatch, tmp_path, caplog):
    assert find(monkeypatch, 0, str(tmp_path / "missing")) == (None, ("", "", ""))
    assert "not set up: cluster_key_file" in caplog.text
    assert find(monkeypatch, 0, unsupported="no KV") == (None, ("", "", ""))
    monkeypatch.setattr(ClusterKey, "load", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        find(monkeypatch, 0, "key")
