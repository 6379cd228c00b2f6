"""Metrics are readable by Prometheus, declared, documented, and shown on the dashboard by names that exist."""

import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard, prometheus, stat, timeseries
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parsed

from membership.node import PortInUse
from mesh.api.exposition import Histogram, Metric, Sheet
from mesh.api.handlers import metrics as handler
from mesh.api.handlers.metrics import Metrics, ReclaimTimes
from mesh.api.metric_names import METRICS, STAGES
from mesh.gpus.inventory import Lending, Presence
from placement.advert import Portion
from tests.gpus.test_inventory import lender

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "examples" / "grafana-dashboard.json"
GAUGE = Metric("some_gauge", "gauge", 'It says "how\\much",\nin two lines.', ("gpu", "model"))


@given(st.text(), st.text(), st.floats())
def test_metrics_round_trip_for_any_label_and_number(gpu: str, model: str, value: float) -> None:
    sheet = Sheet([GAUGE])
    sheet.put("some_gauge", value, gpu=gpu, model=model)
    ((family),) = list(parsed(sheet.text()))
    (sample,) = family.samples
    assert family.documentation == GAUGE.help and family.type == "gauge"
    assert sample.labels == {"gpu": gpu, "model": model}
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    sheet = Sheet([Metric("took_seconds", "histogram", "How long.", ("stage",))])
    sheet.put_histogram("took_seconds", histogram, stage="gone")
    (family,) = parsed(sheet.text())
    told = {(one.name, one.labels.get("le", "")): one.value for one in family.samples}
    assert [told["took_seconds_bucket", le] for le in ("0.1", "1", "+Inf")] == [2, 3, 4]
    assert told["took_seconds_count", ""] == 4 and told["took_seconds_sum", ""] == pytest.approx(7.65)


def test_undeclared_metrics_and_labels_are_refused() -> None:
    sheet = Sheet([GAUGE])
    for name, labels in (("another", {}), ("some_gauge", {"gpu": "x"}), ("some_gauge", {})):
        with pytest.raises(KeyError):
            sheet.put(name, 1.0, **labels)
    sheet.put("some_gauge", None, gpu="x", model="y")
    assert list(parsed(sheet.text())) == [], "unknown readings are left out"


def test_names_follow_prometheus_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(mesh|process)_[a-z_]+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {"job", "user", "node", "name"} & set(metric.labels), (
            f"{metric.name}: the label has unbounded values"
        )


def test_all_metrics_are_documented_with_their_labels() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert told == {metric.name: (metric.kind, metric.labels) for metric in METRICS}


def expressions(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str) and "refId" in value]
        return own + [found for child in value.values() for found in expressions(child)]
    return [found for child in value for found in expressions(child)] if isinstance(value, list) else []


def test_dashboard_uses_only_declared_metrics() -> None:
    job_table = json.loads(DASHBOARD.read_text())
    known = {metric.name: metric for metric in METRICS}
    found = expressions(job_table)
    assert len(found) > 15 and len({panel["id"] for panel in job_table["panels"]}) == len(job_table["panels"])
    for expression in found:
        names = re.findall(r"\b(?:mesh|process)_[a-z_]+", expression)
        assert names, expression
        for name in names:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = known[name] if name in known else known[base]
            assert name == metric.name or metric.kind == "histogram", expression
        asked = set(re.findall(r"(?:by|without) ?\(([a-z, ]+)\)", expression))
        labels = {label.strip() for group in asked for label in group.split(",")}
        assert labels <= {"le", "instance", "job", *(each for name in names for each in labels_of(name, known))}
    shown = {name for expression in found for name in known if name in expression}
    assert len(shown) > 0.6 * len(known), f"missing: {sorted(set(known) - shown)}"


def lost(value: Any, other: Any, path: str = "") -> list[str]:
    """List the paths at which the second value differs from the first."""
    if isinstance(value, dict) and isinstance(other, dict):
        parts = [lost(value[key], other.get(key), f"{path}/{key}") for key in value]
    elif isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        parts = [lost(*pair, f"{path}/{number}") for number, pair in enumerate(zip(value, other, strict=True))]
    else:
        parts = [] if value == other else [[f"{path}: {value!r}, not {other!r}"]]
    return [where for part in parts for where in part]


def test_grafana_types_parse_every_dashboard_field() -> None:
    register_default_plugins()
    job_table = json.loads(DASHBOARD.read_text())
    read = dashboard.Dashboard.from_json(job_table)
    assert lost(job_table, json.loads(json.dumps(read, cls=JSONEncoder))) == [], (
        "the types of Grafana lack these fields"
    )
    kinds = {"stat": stat.Options, "timeseries": timeseries.FieldConfig}
    for panel in read.panels or []:
        assert isinstance(panel, dashboard.Panel) and panel.targets, panel.title
        assert all(isinstance(target, prometheus.Dataquery) for target in panel.targets), (
            "not parsed as a Prometheus query"
        )
        assert panel.field_config is not None
        shown = panel.options if panel.type_val == "stat" else panel.field_config.defaults.custom
        assert isinstance(shown, kinds[panel.type_val]), f"{panel.title}: not parsed as a {panel.type_val}"
    changed = json.loads(DASHBOARD.read_text().replace('"unit"', '"units"', 1))
    again = json.dumps(dashboard.Dashboard.from_json(changed), cls=JSONEncoder)
    assert len(lost(changed, json.loads(again))) == 1, "a misspelt field is detected"


@pytest.mark.promtool
def test_promtool_accepts_metrics_and_dashboard_queries(tmp_path: Path) -> None:
    sheet, histogram = Sheet(METRICS), Histogram((0.1, 1.0))
    for metric in METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        if metric.kind == "histogram":
            sheet.put_histogram(metric.name, histogram, **labels)
        else:
            sheet.put(metric.name, 1.0, **labels)
    told = subprocess.run(
        ["promtool", "check", "metrics"], input=sheet.text(), capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    asked = [
        {"record": f"asked:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(expressions(json.loads(DASHBOARD.read_text())["panels"]))
    ]
    rules = tmp_path / "rules.json"  # JSON is valid YAML
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": asked}]}))
    read = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
    assert read.returncode == 0 and f"{len(asked)} rules found" in read.stdout, read.stderr


def labels_of(name: str, known: dict[str, Metric]) -> tuple[str, ...]:
    metric = known.get(name) or known[re.sub(r"_(bucket|sum|count)$", "", name)]
    return metric.labels


class Node:
    """A node whose parts say what the test sets."""

    def __init__(self) -> None:
        self.inventory = lender()
        self.jobs = SimpleNamespace(attempts={}, event_log=SimpleNamespace(counts=Counter(checkpoint=4)))
        self.statuses: dict[bytes, Any] = {}
        self.jobs.job_table = SimpleNamespace(all=lambda: self.statuses)
        self.members = [SimpleNamespace(state=state) for state in ("alive", "alive", "dead")]
        membership = SimpleNamespace(members=lambda: self.members, clock_offset_s=0.25, problems={"guard": "why"})
        accounts = SimpleNamespace(ran_s=Counter(process=9), ended={("process", "done"): 2}, gpu_s=3.5, lost_s=7.0)
        self.reclaims = ReclaimTimes()
        self.store_room: int | None = 100
        lanes = [SimpleNamespace(urgency="urgent"), SimpleNamespace(urgency="urgent")]
        wire = SimpleNamespace(open=lanes, sent=Counter(urgent=10, background=20))
        store = SimpleNamespace(
            stored_bytes=lambda: 50, foreign_bytes=lambda: 20, remaining_quota=lambda: self.store_room
        )
        engine = SimpleNamespace(starts=Counter(ok=5, failed=1))
        parts: Any = (
            b"me",
            membership,
            self.inventory,
            SimpleNamespace(foreign={"a": SimpleNamespace(memory=12)}),
            {"process": engine},
            self.jobs,
            accounts,
            self.reclaims,
            wire,
            store,
            lambda: 77,
            lambda: Counter(refused_chunks=2, heard=3),
            1000.0,
        )
        self.metrics = Metrics(*parts)

    def samples(self) -> dict[str, float]:
        return dict(_samples(self.metrics._write((), {})))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)


def test_metrics_say_what_is_lent_and_to_whom() -> None:
    node = Node()
    half, whole = Portion("b", 50, 8_000), Portion("b", 20, 1_000)
    guests = ((b"1", object(), False, (half, whole)), (b"2", object(), True, ()), (b"3", None, False, ()))
    for job, guest, held, portions in guests:
        engine = SimpleNamespace(name="process")
        node.jobs.attempts[job] = SimpleNamespace(guest=guest, held=held, portions=portions, engine=engine)
    seen = node.samples()
    for state in ("preparing", "running", "still"):
        assert seen[f'mesh_guests{{engine="process",state="{state}"}}'] == 1
    assert seen['mesh_gpu_share_given_ratio{gpu="b"}'] == 0.7 and seen['mesh_gpu_share_given_ratio{gpu="a"}'] == 0
    assert (
        seen['mesh_gpu_memory_given_bytes{gpu="b"}'] == 9_000 * 2**20 and seen['mesh_gpu_foreign_bytes{gpu="a"}'] == 12
    )
    assert (seen["mesh_lending"], seen["mesh_paused"], seen["mesh_owner_present"]) == (1, 0, 0)
    node.inventory.lending = Lending(lending=True, paused=True)
    node.inventory.presence = Presence(held_by="owner")
    seen = node.samples()
    assert (seen["mesh_lending"], seen["mesh_paused"], seen["mesh_owner_present"]) == (0, 1, 1)
    node.inventory.lending, node.inventory.presence = Lending(lending=True), Presence(held_by="hours")
    seen = node.samples()
    assert (seen["mesh_lending"], seen["mesh_owner_present"]) == (0, 0)


def test_metrics_count_work_at_risk_of_the_jobs_that_run_here() -> None:
    node = Node()
    for number, (runner, risk) in enumerate(((b"me", 5.0), (b"me", 7.0), (b"other", 100.0))):
        job = b"%d" % number
        node.statuses[job] = SimpleNamespace(runner=runner, state="running", at_risk_s=lambda now_ms, risk=risk: risk)
        node.jobs.attempts[job] = SimpleNamespace(
            guest=None, held=False, portions=(), engine=SimpleNamespace(name="process")
        )
    node.statuses[b"x"] = SimpleNamespace(runner=b"me", state="of a later version", at_risk_s=lambda now_ms: 1000.0)
    seen = node.samples()
    assert (seen["mesh_work_at_risk_seconds"], seen["mesh_work_at_risk_max_seconds"]) == (12, 7)
    assert seen['mesh_jobs{state="running"}'] == 3 and seen['mesh_jobs{state="other"}'] == 1
    assert seen['mesh_jobs{state="done"}'] == 0, "each state has a sample"
    assert Node().samples()["mesh_work_at_risk_max_seconds"] == 0


def test_metrics_of_mesh_store_and_network() -> None:
    node = Node()
    seen = node.samples()
    assert (seen['mesh_members{state="alive"}'], seen['mesh_members{state="dead"}']) == (2, 1)
    assert (seen['mesh_refused_total{reason="chunks"}'], seen['mesh_gossip_total{event="heard"}']) == (2, 3)
    assert seen['mesh_transfers_open{urgency="urgent"}'] == 2 and seen['mesh_transfers_open{urgency="background"}'] == 0
    assert seen['mesh_transfer_sent_bytes_total{urgency="background"}'] == 20
    assert (seen['mesh_store_bytes{owner="all"}'], seen['mesh_store_bytes{owner="others"}']) == (50, 20)
    assert seen["mesh_store_room_bytes"] == 100 and seen["mesh_problems"] == 1
    assert seen['mesh_guest_starts_total{engine="process",result="failed"}'] == 1
    node.store_room = None
    assert "mesh_store_room_bytes" not in node.samples(), "there is no bound"


def test_stages_of_reclaims_are_counted_once_each() -> None:
    times = ReclaimTimes()
    times.observe({STAGES[0]: 0.01, "a stage of a later version": 9.0})
    times.observe({})
    assert times.count == 2 and times.stages[STAGES[0]].sum == 0.01


async def test_answer_is_repeated_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    node, now, written = Node(), 100.0, list[int]()
    monkeypatch.setattr(handler, "readings", tuple)
    monkeypatch.setattr(handler, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    monkeypatch.setattr(node.metrics, "_write", lambda gpus, process: written.append(1) or f"{len(written)}")
    assert [await node.metrics.text() for _ in range(2)] == ["1", "1"]
    now += handler.FRESH_S
    assert await node.metrics.text() == "2"


async def test_port_of_the_metrics_that_is_taken_is_named() -> None:
    node = Node()
    runner = await node.metrics.serve("127.0.0.1", 0)
    try:
        port = runner.addresses[0][1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 .*metrics_port PORT"):
            await node.metrics.serve("127.0.0.1", port)
    finally:
        await runner.cleanup()
