"""Commands, links and variables on the pages exist. (Their numbers: ``test_benchmarks.py`` and
``test_proof.py``.)"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from sgl_flashsample import switches
from sgl_flashsample.sglang import metrics
from sgl_flashsample.sglang.row_table import Reason

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "autotune", "benchmarks", "sgl_flashsample", "sgl_flashsample/sglang")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/RESULTS.md",
    *(f"{folder}/README.md" for folder in (*FOLDERS, "tests/proof")),
]
OPERATIONS = ROOT / "sgl_flashsample" / "sglang"
COMMAND = re.compile(r"(?:^|`)make ([a-z-]+)", re.M)


def test_the_commands_of_the_readme_are_targets_and_ci_runs_them():
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    named = set(COMMAND.findall((ROOT / "README.md").read_text()))
    assert named == {"demo", "test"}
    for target in named:
        assert f"\n{target}:" in makefile and f"make {target}\n" in ci
    for target in COMMAND.findall((ROOT / "CONTRIBUTING.md").read_text()):
        assert f"\n{target}:" in makefile


def test_the_readme_or_the_page_of_operations_names_every_environment_variable_that_the_code_reads():
    pages = ((ROOT / "README.md").read_text(), (OPERATIONS / "README.md").read_text())
    named = {name for page in pages for name in re.findall(r"\bFLASHSAMPLE_[A-Z_]+\b", page)}
    assert named == switches.VARIABLES.keys() - {switches.REQUESTED_VARIABLE}, "which the plugin sets for its processes"


def test_every_reason_against_the_fused_pass_is_explained():
    table = (OPERATIONS / "README.md").read_text().split("| reason |")[1].split("\n\n")[0]
    named = [word for line in table.splitlines() for word in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(Reason)


def test_every_metric_is_explained_and_the_dashboard_and_the_alerts_ask_for_no_other(monkeypatch):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(client, kind, functools.partial(getattr(client, kind), registry=registry))
    metrics.Metrics(prometheus=True)
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in registry.collect()}
    table = (OPERATIONS / "README.md").read_text().split("| metric |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(sglang:\w+)`", table)) == names
    for file in ("alerts.yml", "grafana.json"):
        asked = set(re.findall(r"sglang:flashsample_\w+", (OPERATIONS / "monitoring" / file).read_text()))
        assert {name.removesuffix("_bucket") for name in asked} <= names, file


def test_every_query_of_the_dashboard_is_of_the_chosen_models_and_servers():
    dashboard = json.loads((OPERATIONS / "monitoring" / "grafana.json").read_text())
    assert {one["name"] for one in dashboard["templating"]["list"]} == {"datasource", "model_name", "instance"}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(dashboard["panels"]) == 6
    for query in queries:
        chosen = query.count('model_name=~"$model_name",instance=~"$instance"}')
        assert chosen == query.count("sglang:flashsample_") > 0, query


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)", text) if not link.startswith("http")]
    for link in links:
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in anchors, link


def test_no_page_and_no_message_installs_a_package_that_is_on_no_index():
    """A release is not published: a checkout is what can be installed."""
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in (*sources, *(ROOT / page for page in PAGES))}
    published = re.compile(r"pip install [^\w/.]*sgl[-_]flashsample")
    assert [path.name for path, text in texts.items() if published.search(text)] == []


def test_the_readme_is_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
