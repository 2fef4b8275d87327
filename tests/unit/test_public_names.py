"""Public names: the old ones work for one release and say so once; values of labels are in snake_case."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from store_process import Store
from typer.testing import CliRunner

from vllm_kvtier import config, renamed
from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy import config as proxy_config
from vllm_kvtier.proxy.config_file import load_settings
from vllm_kvtier.store.options import StoreOptions, parse
from vllm_kvtier.store.server import metrics as store_metrics
from vllm_kvtier.telemetry import stats, table

RENAMED_LOG = "vllm.kvtier.renamed"


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Messages of warnings about renamed options so far."""
    renamed.warn.cache_clear()
    with caplog.at_level(logging.WARNING, RENAMED_LOG):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == RENAMED_LOG]


# -- engine options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", sorted(config.RENAMED))
def test_renamed_engine_option_old_name_is_read_with_one_warning(old, warnings):
    new = config.RENAMED[old]
    for _ in range(2):
        read = KVTierConfig.from_extra_config({old: 0.25})
        assert read == KVTierConfig.from_extra_config({new: 0.25}) != KVTierConfig()
    assert warnings() == [f"kvtier: option {old} is now called {new}; the old name works until the next release"]


def test_renamed_engine_option_both_names_are_refused():
    with pytest.raises(ConfigError, match="lend_share and peer_lease_share name the same option"):
        KVTierConfig.from_extra_config({"lend_share": 0.1, "peer_lease_share": 0.1})


# -- flags -------------------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_renamed_flag_old_name_is_accepted_with_one_warning(warnings, tmp_path):
    for flag in ("--space", "--namespace"):  # old name
        refused = run("clear", flag, "no id", "--socket", str(tmp_path / "none"))
        assert refused.exit_code == 2 and "32 hexadecimal digits" in refused.stderr.replace("\n", " ")
    assert warnings() == ["kvtier: option --space is now called --namespace; the old name works until the next release"]


def test_renamed_flag_both_names_are_refused():
    assert run("clear", "--space", "00", "--namespace", "00").exit_code == 2  # old name


def test_renamed_flag_is_hidden():
    assert "--space" not in run("clear", "--help").output and "--like" not in run("doctor", "--help").output


def test_renamed_flag_of_doctor_is_accepted(warnings, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("a prompt")
    flags = ["--json", "--remote", "--socket", str(tmp_path / "none"), "--prompt", str(file), "--like", str(file)]
    assert json.loads(run("doctor", *flags).stdout)
    assert len(warnings()) == 1 and "option --like is now called --compare-with" in warnings()[0]


# -- the proxy's options -----------------------------------------------------------------------------------------------

DECODE = (proxy_config.EngineAddress("http://d:1"),)


@pytest.mark.parametrize("old", sorted(proxy_config.RENAMED))
def test_renamed_proxy_option_old_key_and_old_flag_are_read_with_one_warning(old, warnings, tmp_path):
    new = proxy_config.RENAMED[old]
    file = tmp_path / "proxy.yaml"
    file.write_text(f"engines: [{{role: decode, url: 'http://d:1'}}]\n{old}: 7\n")
    in_file, as_flag = load_settings(str(file), {}), load_settings(None, {"decode": DECODE, old: 7})
    assert in_file.proxy == as_flag.proxy == proxy_config.ProxyConfig(decode=DECODE, **{new: 7})
    assert warnings() == [f"kvtier: option {old} is now called {new}; the old name works until the next release"]


def test_renamed_proxy_option_flag_overrides_old_key_in_the_file(tmp_path, warnings):
    file = tmp_path / "proxy.yaml"
    file.write_text("engines: [{role: decode, url: 'http://d:1'}]\nbackoff_most: 7\n")  # old name
    assert load_settings(str(file), {"backoff_max": 9.0}).proxy.backoff_max == 9.0 and len(warnings()) == 1


def test_renamed_proxy_option_both_keys_are_refused(tmp_path):
    file = tmp_path / "proxy.yaml"
    file.write_text("backoff_most: 7\nbackoff_max: 7\n")  # old name
    with pytest.raises(ConfigError, match="backoff_most and backoff_max name the same option"):  # old name
        load_settings(str(file), {})


def test_renamed_proxy_option_old_flag_is_accepted_and_hidden(monkeypatch, warnings):
    served = []
    monkeypatch.setattr("vllm_kvtier.proxy.server.serve", lambda path, load, warn: served.append(load().proxy))
    flags = ["proxy", "--decode", "http://d:1", "--retry-after-most", "7"]
    assert CliRunner().invoke(app, flags).exit_code == 0
    assert served[0].retry_after_max == 7.0 and len(warnings()) == 1
    shown = CliRunner().invoke(app, ["proxy", "--help"], env={"COLUMNS": "200"}).output
    assert "--retry-after-max" in shown and "--retry-after-most" not in shown


# -- the page with both names ------------------------------------------------------------------------------------------


def test_migration_page_has_every_renamed_option_and_metric():
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    rows = {tuple(re.findall(r"`([^`]*)`", line)) for line in page.splitlines() if line.startswith("| `")}
    for old, new in (*config.RENAMED.items(), *proxy_config.RENAMED.items()):
        assert (old, new) in rows
    metrics = {family.name for families in table.families().values() for family in families}
    for prefix, names in (("vllm:kvtier_", stats.OLD_NAMES), ("kvtier_store_", store_metrics.OLD_NAMES)):
        for new, old in names.items():
            end = "_total" if f"{prefix}{new}_total" in metrics else ""
            assert (f"{prefix}{old}{end}", f"{prefix}{new}{end}") in rows and f"{prefix}{new}{end}" in metrics


# -- the store's metrics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
def test_store_metrics_old_series_exist_only_with_hidden_metrics(hidden, tmp_path):
    store = Store(tmp_path)
    try:
        store.start(f"--show-hidden-metrics={hidden}")
        wanted = StoreOptions(show_hidden_metrics=hidden)
        assert parse(wanted.arguments()) == wanted
        state = store_metrics.State(store.counts(), {})
    finally:
        store.kill()
    reactor = SimpleNamespace(call_soon=lambda job: job())
    collector = store_metrics.StoreCollector(reactor, lambda: state, old_names=hidden)
    families = {family.name: family for family in collector.collect()}
    olds = {"kvtier_store_" + old for old in store_metrics.OLD_NAMES.values() if not old.startswith("tier_")}
    assert olds & families.keys() == (olds if hidden else set())
    if hidden:
        [sample] = families["kvtier_store_looked_up_units"].samples
        assert sample.name == "kvtier_store_looked_up_units_total" and sample.value == 0
