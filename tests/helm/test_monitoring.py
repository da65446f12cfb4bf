"""Dashboard, rules and triggers speak of metrics that the server has, and of their labels' values."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.metrics import Metrics
from tests.helm.chart import CHART, ROOT, only, rendered, yaml

RULES = ROOT / "deploy/prometheus/rules.yaml"
DASHBOARD = ROOT / "deploy/grafana/dashboard.json"
SELECTOR = re.compile(r"\b((?:chorus|gen_ai_server)_\w+)(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
SCRAPE_LABELS = {"namespace", "pod", "job", "instance"}
"""What Prometheus adds."""


def samples() -> dict[str, dict[str, set[str]]]:
    """Sample name -> label -> values, of a server's /metrics."""
    text = Metrics(FakeEngine(EngineConfig())).render().decode()
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def dashboard_queries() -> Iterator[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def rule_queries() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def scaling_queries() -> Iterator[tuple[str, str]]:
    for trigger in only(rendered("keda"), "ScaledObject")["spec"]["triggers"]:
        yield "ScaledObject", trigger["metadata"]["query"]
    for metric in only(rendered("hpa"), "HorizontalPodAutoscaler")["spec"]["metrics"]:
        yield "HorizontalPodAutoscaler", metric["pods"]["metric"]["name"]


QUERIES = [*dashboard_queries(), *rule_queries(), *scaling_queries()]


@pytest.mark.parametrize(("place", "query"), QUERIES)
def test_metrics_and_labels_exist(place: str, query: str) -> None:
    known = samples()
    found = SELECTOR.findall(query)
    assert found or "chorus:" in query, "no metric of ours"
    for name, selector in found:
        assert name in known, f"{place}: the server has no {name}"
        for label, operator, value in MATCHER.findall(selector):
            assert label in known[name] or label in SCRAPE_LABELS, f"{place}: {name} has no label {label}"
            if operator in ("=", "!=") and label not in SCRAPE_LABELS:
                assert value in known[name][label], f"{place}: {name} never has {label}={value}"


def test_recorded_series_that_are_used_exist() -> None:
    recorded = {name for name, _ in rule_queries() if ":" in name}
    for place, query in QUERIES:
        assert set(re.findall(r"chorus:[\w:]+", query)) <= recorded, place


def test_every_metric_is_on_the_dashboard() -> None:
    """Of a histogram any of its series: they tell the same."""

    def family(name: str) -> str:
        return re.sub(r"_(bucket|count|sum)$", "", name)

    shown = {family(name) for _, query in dashboard_queries() for name, _ in SELECTOR.findall(query)}
    assert {family(name) for name in samples()} <= shown


def test_queries_of_quantiles_keep_the_bounds() -> None:
    """Without `le` there is nothing to take a quantile of, and a panel stays empty without a word."""
    for place, query in QUERIES:
        if "_bucket" in query:
            assert re.search(r"histogram_quantile\(0\.\d+, sum by \([^)]*\ble\)", query), place


def test_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and dashboard["uid"] == "chorus"
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in dashboard["panels"]), "it must be portable"
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels overlap"


def test_chart_carries_dashboard_and_rules() -> None:
    objects = rendered("cpu")
    carried = only(objects, "ConfigMap", "chorus-dashboard")
    assert json.loads(carried["data"]["chorus.json"]) == json.loads(DASHBOARD.read_text())
    assert carried["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert only(objects, "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())


def test_rules_pass_their_own_tests() -> None:
    promtool = Path(os.environ["HELM_TOOLS"]) / "bin/promtool"
    for arguments in (["check", "rules", RULES.name], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run([promtool, *arguments], cwd=RULES.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test() -> None:
    alerts = {name for name, _ in rule_queries() if ":" not in name}
    tested = {
        check["alertname"]
        for test in yaml.safe_load((RULES.parent / "rules_test.yaml").read_text())["tests"]
        for check in test.get("alert_rule_test", [])
        if check["exp_alerts"]
    }
    assert alerts == tested


def test_scrape_carries_the_key_where_there_is_one() -> None:
    (endpoint,) = only(rendered("podmonitor"), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": {"name": "chorus-scrape", "key": "apiKey"}}
    (endpoint,) = only(rendered("cpu"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["path"] == "/metrics" and "authorization" not in endpoint


def test_files_of_deploy_are_the_charts() -> None:
    assert RULES.resolve() == CHART / "files/rules.yaml"
    assert DASHBOARD.resolve() == CHART / "files/dashboard.json"


def test_dashboard_speaks_promql(tmp_path: Path) -> None:
    promtool = Path(os.environ["HELM_TOOLS"]) / "bin/promtool"
    queries = [query.replace("$__rate_interval", "5m") for _, query in dashboard_queries() if "(" in query]
    rules = [
        {"record": f"panel:{number}", "expr": query}
        for number, query in enumerate(queries)
        if not query.startswith("label_values")
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
    assert len(rules) > 20 and done.returncode == 0, done.stdout + done.stderr
