"""The dashboard, the alerts and the table of metrics: against what is really exported, and against a real Prometheus.

Prometheus is the one on PATH or Debian's package (prometheus_server.py). Without it the tests that need it skip, and
names are still compared with the table.
"""

import copy
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import prometheus_server
import pytest
import yaml
from metrics_harness import MetricsWorld
from prometheus_server import Prometheus
from support import eventually

from vllm_kvtier.store.server import metrics as store_metrics
from vllm_kvtier.telemetry import table

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "examples" / "grafana"
ALERTS = GRAFANA / "alerts.yml"
VARIABLES = {"$instance": ".*", "$model": ".*", "$__rate_interval": "10m"}
OURS = re.compile(r"\b(?:vllm:kvtier|kvtier_store|kvtier_proxy)_\w+")
SELECTOR = re.compile(r"\b(?:vllm:kvtier|kvtier_store|kvtier_proxy)_\w+(?:\{[^}]*\})?")
SERIES = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    try:
        return prometheus_server.programs()
    except prometheus_server.NotThere as error:
        pytest.skip(f"{error}")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = MetricsWorld(tmp_path_factory.mktemp("metrics"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def prometheus(programs, world, tmp_path_factory):
    """It has scraped everything, with all series there are, before more was made to happen: so rates are seen."""
    folder = tmp_path_factory.mktemp("prometheus")
    world.load()
    with Prometheus(programs["prometheus"], folder, world.targets, rules=[ALERTS]) as prometheus:
        well = dict.fromkeys(world.targets, "up")
        eventually(lambda: prometheus.scraped() == well, 60, "all targets are scraped")
        world.load()
        yield prometheus


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads((GRAFANA / "kvtier.json").read_text())


def queries(dashboard: dict) -> dict[str, tuple[str, str]]:
    """{panel and letter: (PromQL as Grafana sends it, legend)}."""
    found = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found[f"{panel['title']} {target['refId']}"] = query, target["legendFormat"]
    return found


def unanswered(asked: dict[str, tuple[str, str]], prometheus: Prometheus) -> dict[str, str]:
    """{panel and letter: what is wrong with its query}, of some of ``queries``."""
    wrong = {}
    for name, (query, legend) in asked.items():
        try:
            samples = prometheus.query(query)
        except ValueError as error:
            wrong[name] = str(error)
            continue
        labels = set(re.findall(r"{{(\w+)}}", legend))
        if not samples:
            wrong[name] = f"no series: {query}"
        elif not labels <= samples[0].labels.keys():
            wrong[name] = f"legend {legend} of series with {samples[0].labels}"
    return wrong


def test_dashboard_every_panel_has_series(prometheus, world, dashboard):
    asked, left = queries(dashboard), {}
    assert len(asked) > 80

    def answered() -> bool:
        nonlocal asked, left
        left = unanswered(asked, prometheus)
        asked = {name: asked[name] for name in left}
        return not left

    try:
        eventually(answered, 60)
    except AssertionError:
        pytest.fail(f"queries without an answer: {json.dumps(left, indent=1)}")


@pytest.mark.parametrize(
    "name, other",
    [
        ("vllm:kvtier_prompt_tokens_total", "vllm:kvtier_prompt_token_total"),
        ("kvtier_store_tier_read_bytes_total", "kvtier_store_tier_reads_bytes_total"),
        ("kvtier_proxy_queue", "kvtier_proxy_queues"),
        ("by (kind) (rate(vllm:kvtier_lookups_declined_total", "by (reason) (rate(vllm:kvtier_lookups_declined_total"),
    ],
)
def test_dashboard_wrong_metric_name_is_detected(prometheus, world, dashboard, name, other):
    text = json.dumps(copy.deepcopy(dashboard))
    assert name in text
    mutated = json.loads(text.replace(name, other))
    affected = {panel for panel, (query, _) in queries(dashboard).items() if name in query}
    assert affected and affected <= unanswered(queries(mutated), prometheus).keys()


def test_dashboard_variables_have_values(prometheus, world, dashboard):
    asked = re.compile(r"label_values\((.*), (\w+)\)")
    variables = [each for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert [each["name"] for each in variables] == ["instance", "model"]
    for variable in variables:
        selector, label = asked.fullmatch(variable["definition"]).groups()
        eventually(lambda s=selector, n=label: prometheus.ask(f"label/{n}/values", **{"match[]": s}), 30)


# -- alerts ------------------------------------------------------------------------------------------------------------


def alerts() -> dict[str, dict]:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return {rule["alert"]: rule for rule in rules}


def test_alerts_query_existing_series(prometheus, world):
    """Healthy, it does not fire; but each metric in it has series, and Prometheus has no word against it."""
    for name, rule in alerts().items():
        prometheus.query(rule["expr"])
        selectors = set(SELECTOR.findall(rule["expr"]))
        assert selectors, name
        for selector in selectors:
            if "too_busy" in selector:  # only where a request was refused
                selector = selector.partition("{")[0]
            eventually(lambda s=selector: prometheus.query(s), 30, f"{name}: {selector}")
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == alerts().keys()
    eventually(lambda: all(r["health"] == "ok" for r in prometheus.ask("rules")["groups"][0]["rules"]), 30)


_E, _ON = 'instance="e",model_name="m",engine="0"', "{%s}"
FIRES = {
    "KvtierWrongChecksum": ({f'vllm:kvtier_integrity_failures_total{{{_E},kind="host"}}': "0x20 1x100"}, "30m"),
    "KvtierStoreSilent": ({'kvtier_store_responding{instance="s"}': "1x5 0x20"}, "10m"),
    "KvtierEngineWithoutStore": ({f"vllm:kvtier_store_up{{{_E}}}": "1x5 0x20"}, "15m"),
    "KvtierTierUnavailable": ({'kvtier_store_tier_up{instance="s",tier="disk"}': "1x5 0x20"}, "15m"),
    "KvtierClusterMemoryMissing": ({'kvtier_store_tier_segment_up{instance="s",tier="mooncake"}': "1x5 0x20"}, "20m"),
    "KvtierClusterReadsFail": ({'kvtier_store_tier_restarts_total{instance="s",tier="mooncake"}': "0x5 0+2x30"}, "30m"),
    "KvtierClusterFull": (
        {'kvtier_store_tier_state{instance="s",tier="mooncake",state="read_only"}': "0x5 1 1 0 1 1 1 1x60"}, "50m",
    ),
    "KvtierLoadsFail": (
        {f'vllm:kvtier_loads_total{{{_E},kind="ok"}}': "0+90x60", f'vllm:kvtier_loads_total{{{_E},kind="failed"}}':
         "0+10x60"}, "30m",
    ),
    "KvtierHitRateCollapsed": (
        # Nine of ten tokens were found for eight hours, and one of ten since.
        {f'vllm:kvtier_prompt_tokens_total{{{_E},kind="local_compute"}}': "0+6000x480 2880000+54000x60",
         f'vllm:kvtier_prompt_tokens_total{{{_E},kind="host"}}': "0+54000x480 25920000+6000x60"}, "520m",
    ),
    "KvtierProxyNotReady": ({'kvtier_proxy_ready{instance="p"}': "1x5 0x20"}, "10m"),
    "KvtierProxyTooBusy": (
        {'kvtier_proxy_requests_total{instance="p",route="r",outcome="ok"}': "0+90x60",
         'kvtier_proxy_requests_total{instance="p",route="r",outcome="too_busy"}': "0+10x60",
         # Those of monitoring are many, and none of them waits.
         'kvtier_proxy_requests_total{instance="p",route="/ready",outcome="ok"}': "0+900x60"}, "30m",
    ),
    "KvtierProxyEngineUnavailable": (
        {'kvtier_proxy_engine_up{instance="p",role="decode",engine="http://d"}': "1x5 0x20"}, "20m",
    ),
}  # fmt: skip
HEALTHY = {
    f'vllm:kvtier_integrity_failures_total{{{_E},kind="host"}}': "0x600",
    f"vllm:kvtier_store_up{{{_E}}}": "1x600",
    'kvtier_store_responding{instance="s"}': "1x600",
    'up{job="kvtier-store",instance="s"}': "1x600",
    'kvtier_store_tier_up{instance="s",tier="disk"}': "1x600",
    'kvtier_store_tier_up{instance="s",tier="mooncake"}': "1x600",
    'kvtier_store_tier_segment_up{instance="s",tier="mooncake"}': "1x600",
    'kvtier_store_tier_restarts_total{instance="s",tier="mooncake"}': "0x290 1x300",
    'kvtier_store_tier_state{instance="s",tier="mooncake",state="read_only"}': "0x600",
    f'vllm:kvtier_loads_total{{{_E},kind="ok"}}': "0+90x600",
    f'vllm:kvtier_loads_total{{{_E},kind="failed"}}': "0x600",
    f'vllm:kvtier_prompt_tokens_total{{{_E},kind="local_compute"}}': "0+6000x600",
    f'vllm:kvtier_prompt_tokens_total{{{_E},kind="host"}}': "0+54000x600",
    'kvtier_proxy_ready{instance="p"}': "1x600",
    'kvtier_proxy_requests_total{instance="p",route="r",outcome="ok"}': "0+90x600",
    'kvtier_proxy_requests_total{instance="p",route="r",outcome="too_busy"}': "0x600",
    'kvtier_proxy_engine_up{instance="p",role="decode",engine="http://d"}': "1x600",
}


def rule_tests() -> dict:
    """For promtool: nothing fires where all is well, and each alert where what it is for happens."""

    def case(series: dict[str, str], at: str, fires: list[str]) -> dict:
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fires]
        firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{"expr": firing, "eval_time": at, "exp_samples": samples}],
        }

    cases = [case(HEALTHY, "550m", [])]
    cases += [case({**HEALTHY, **series}, at, [name]) for name, (series, at) in FIRES.items()]
    return {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}


def test_alerts_fire_only_on_their_condition(programs, tmp_path):
    assert FIRES.keys() == alerts().keys()
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump(rule_tests()))
    done = subprocess.run([programs["promtool"], "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_config_is_valid_and_complete(programs, world):
    done = subprocess.run(
        [programs["promtool"], "check", "config", str(GRAFANA / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == world.targets.keys()


# -- without Prometheus ------------------------------------------------------------------------------------------------


def names() -> dict[str, str]:
    """{name: type} of the table."""
    return {family.name: family.sort for found in table.families().values() for family in found}


def scraped(port: int) -> dict[str, str]:
    """{name: type} of what is exported there, also of metrics that have no samples yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    # Of a counter and a histogram, prometheus_client shows the moment of its creation as well.
    return {name: sort for name, sort in types.items() if OURS.match(name) and not name.endswith("_created")}


@pytest.mark.parametrize("place", ["engine", "store", "proxy"])
def test_metrics_table_equals_exported_metrics(world, place):
    world.load()
    told = {f.name: f.sort for f in table.families()[place]}
    info = store_metrics.PREFIX + store_metrics.INFO.name
    told = {name: "gauge" if name == info else sort for name, sort in told.items()}
    assert scraped(getattr(world, place).port) == told


def test_dashboard_docs_page_is_current():
    assert (ROOT / "docs" / "metrics.md").read_text() == table.page(), (
        "run: python -m vllm_kvtier.telemetry.table > docs/metrics.md"
    )


def test_dashboard_equals_output_of_its_tool(tmp_path):
    made = tmp_path / "made.json"
    subprocess.run([sys.executable, ROOT / "tools" / "grafana_dashboard.py", made], check=True)
    assert (GRAFANA / "kvtier.json").read_text() == made.read_text(), "run: python tools/grafana_dashboard.py"


def test_dashboard_and_alerts_use_documented_metrics(dashboard):
    asked = [query for query, _ in queries(dashboard).values()] + [rule["expr"] for rule in alerts().values()]
    known = names()
    for query in asked:
        for name in OURS.findall(query):
            base = SERIES.sub("", name)
            assert name in known or known.get(base) == "histogram", f"{name} in {query}"


def test_dashboard_panels_have_unique_ids_and_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_dashboard_files_mounted_by_compose_exist():
    services = yaml.safe_load((GRAFANA / "compose.yml").read_text())["services"]
    mounted = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    assert len(mounted) == 5 and all((GRAFANA / path).is_file() for path in mounted)
