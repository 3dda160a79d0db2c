"""The board of Grafana and the page about metrics name what /metrics has."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from rwkv_batch.wire.metrics import FAMILIES, PREFIX

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "board.json").read_text())
PAGE = (ROOT / "docs" / "metrics.md").read_text()
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
# A sample's name in a query, with its selector if it has one.
SAMPLES = re.compile(rf"{PREFIX}(\w+)(?:\{{([^}}]*)\}})?")


def labels_of_samples() -> dict[str, set[str]]:
    """The labels that each sample has."""
    found = {}
    for name, family in FAMILIES.items():
        for suffix in SUFFIXES[family.kind]:
            found[name + suffix] = {*family.labels, *(["le"] if suffix == "_bucket" else [])}
    return found


LABELS = labels_of_samples()
QUERIES = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=[f"{t} {q['refId']}" for t, q in QUERIES])
def test_a_query_asks_for_what_there_is(title, target):
    query = target["expr"]
    asked = SAMPLES.findall(query)
    assert asked and not {name for name, _ in asked} - set(LABELS)
    for name, selector in asked:
        assert set(re.findall(r"(\w+)\s*[=!]~?", selector)) <= LABELS[name]
    common = set.intersection(*(LABELS[name] for name, _ in asked))
    groups = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    assert groups <= common
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= groups
    # counters only ever grow: what is shown of them is how fast, and of how many restarts there were
    totals = [name for name, _ in asked if name.endswith("_total")]
    assert not totals or "rate(" in query or totals == ["restarts_total"]
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_the_models_to_choose_from_are_those_of_a_metric():
    (variable,) = [each for each in BOARD["templating"]["list"] if each["type"] == "query"]
    name, label = re.fullmatch(rf"label_values\({PREFIX}(\w+), (\w+)\)", variable["query"]).groups()
    assert label in LABELS[name]


def test_every_metric_is_on_the_board():
    shown = {name for _, target in QUERIES for name, _ in SAMPLES.findall(target["expr"])}
    missing = {
        name
        for name, family in FAMILIES.items()
        if not shown & {name + suffix for suffix in SUFFIXES[family.kind]}
    }
    assert not missing - {"request_rows"}


def test_panels_lie_beside_each_other():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for one, two in combinations([panel["gridPos"] for panel in BOARD["panels"]], 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        below = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or below
        assert one["x"] + one["w"] <= 24


def test_the_page_lists_every_metric_with_its_labels():
    rows = re.findall(rf"^\| `{PREFIX}(\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert listed == {
        name + ("_total" if family.kind == "counter" else ""): (family.kind, set(family.labels))
        for name, family in FAMILIES.items()
    }


def test_no_label_holds_what_clients_choose():
    """The names of keys are chosen by who runs the server."""
    labels = {label for family in FAMILIES.values() for label in family.labels}
    assert labels == {
        *("handler", "method", "status", "process", "model_name", "purpose", "outcome"),
        *("finished_reason", "kind", "tier", "direction", "key", "device"),
    }
