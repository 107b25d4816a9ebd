"""Pages name what exists: commands, links, files, variables, reasons, metrics; their examples print what they show, and
the numbers of README.md are those of the result files. (Tables of results: ``test_benchmarks.py``, ``test_proof.py``.
Commands: ``test_documented_commands.py``.)"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab import bootstrap

import sgl_flashsample
from sgl_flashsample import defaults, screen_race, switches
from sgl_flashsample.autotune import decide, plan, verify
from sgl_flashsample.sglang import metrics, step_graphs, support, versions
from sgl_flashsample.sglang.row_table import Reason
from sgl_flashsample.sglang.screen_lifecycle import MEMORY_SHARES, ScreenMode
from sgl_flashsample.tables.lookup import load_table
from sgl_flashsample.tables.schema import FILE_PREFIX

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = ("kernels", "autotune", "benchmarks", "sgl_flashsample", "sgl_flashsample/sglang")
WRITTEN = [  # by hand, apart from what stands between markers
    "README.md",
    "CONTRIBUTING.md",
    *(f"{folder}/README.md" for folder in FOLDERS if folder != "benchmarks"),
    *(str(page.relative_to(ROOT)) for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "results"),
]
PAGES = [
    *WRITTEN,
    "tests/proof/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "benchmarks").glob("*.md"))),
    *(str(page.relative_to(ROOT)) for page in sorted((DOCS / "results").rglob("*.md"))),
]
OPERATIONS = ROOT / "sgl_flashsample" / "sglang"
COMMAND = re.compile(r"(?:^|`)make ([a-z-]+)", re.M)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.M | re.S)
GENERATED = re.compile(r"<!-- results:[a-z-]+ -->.*?<!-- end -->", re.S)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def test_the_commands_of_the_pages_are_targets_and_ci_runs_those_of_the_readme():
    makefile, ci = text_of("Makefile"), text_of(".ci/run")
    named = set(COMMAND.findall(text_of("README.md")))
    assert named == {"demo", "test"}
    for target in named:
        assert f"make {target}\n" in ci
    for page in WRITTEN:
        for target in COMMAND.findall(text_of(page)):
            assert f"\n{target}:" in makefile, page


def test_the_page_of_variables_explains_every_environment_variable_that_the_code_reads():
    table = text_of("docs/operate/variables.md").split("| environment variable |")[1].split("\n\n")[0]
    explained = {name for line in table.splitlines() for name in re.findall(r"`(FLASHSAMPLE_\w+)`", line.split("|")[1])}
    assert explained == switches.VARIABLES.keys() - {switches.REQUESTED_VARIABLE}, "which the plugin sets itself"
    named = {name for page in PAGES for name in re.findall(r"\bFLASHSAMPLE_[A-Z_]+\b", text_of(page))}
    assert named <= explained


def test_every_reason_against_the_fused_pass_is_explained():
    table = text_of("docs/operate/status.md").split("| reason | the row")[1].split("\n\n")[0]
    named = [word for line in table.splitlines()[2:] for word in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(Reason)


def test_every_metric_is_explained_and_the_dashboard_and_the_alerts_ask_for_no_other(monkeypatch):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(client, kind, functools.partial(getattr(client, kind), registry=registry))
    metrics.Metrics(prometheus=True)
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in registry.collect()}
    page = text_of("docs/operate/metrics.md")
    assert set(re.findall(r"`(sglang:\w+)`", page.split("| metric |")[1].split("\n\n")[0])) == names
    for file in ("alerts.yml", "grafana.json"):
        asked = set(re.findall(r"sglang:flashsample_\w+", (OPERATIONS / "monitoring" / file).read_text()))
        assert {name.removesuffix("_bucket") for name in asked} <= names, file


def test_every_query_of_the_dashboard_is_of_the_chosen_models_and_servers():
    dashboard = json.loads((OPERATIONS / "monitoring" / "grafana.json").read_text())
    assert {one["name"] for one in dashboard["templating"]["list"]} == {"datasource", "model_name", "instance"}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for query in queries:
        chosen = query.count('model_name=~"$model_name",instance=~"$instance"}')
        assert chosen == query.count("sglang:flashsample_") > 0, query


def test_the_pages_name_the_panels_of_the_dashboard():
    panels = json.loads((OPERATIONS / "monitoring" / "grafana.json").read_text())["panels"]
    titles = [panel["title"] for panel in panels]
    assert re.findall(r"\*([^*]+)\*", text_of("docs/operate/metrics.md")) == titles
    assert set(re.findall(r"\*([A-Z][^*]+)\*", text_of("docs/operate/rollout.md").replace("**", ""))) <= set(titles)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)", text_of(page)) if not link.startswith("http")]
    for link in links:
        name, _, heading = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in anchors, link


@pytest.mark.parametrize("page", WRITTEN)
def test_the_files_that_a_page_names_are_there(page):
    """A page of docs/ cannot link to a file that is not a page: it names it."""
    folders = "autotune|benchmarks|docs|kernels|sgl_flashsample|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text_of(page)):
        assert (ROOT / name).exists(), name


def test_no_page_and_no_message_installs_a_package_that_is_on_no_index():
    """A release is not published: a checkout is what can be installed."""
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in (*sources, *(ROOT / page for page in PAGES))}
    published = re.compile(r"pip install [^\w/.]*sgl[-_]flashsample")
    assert [path.name for path, text in texts.items() if published.search(text)] == []


def words(text: str) -> int:
    """Words that somebody wrote and somebody reads: without code blocks, tables of results, targets of links and
    directives."""
    for left_out, by in ((GENERATED, ""), (CODE_BLOCK, ""), (re.compile(r"\]\([^)]*\)"), "]")):
        text = left_out.sub(by, text)
    lines = [line for line in text.splitlines() if not line.startswith((":::", "    "))]
    return sum(any(map(str.isalnum, word)) for line in lines for word in line.split())


def test_the_readme_has_at_most_130_lines_a_page_1500_words_and_all_pages_12000():
    counts = {page: words(text_of(page)) for page in WRITTEN}
    assert len(text_of("README.md").splitlines()) <= 130
    assert max(counts.values()) <= 1_500 and sum(counts.values()) <= 12_000, sum(counts.values())


@pytest.mark.slow
def test_the_pages_build_without_a_warning_and_the_reference_has_every_public_name(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "site" / "library" / "reference" / "index.html").read_text()
    documented = set(re.findall(r'id="sgl_flashsample\.[\w.]*?(\w+)"', built))
    assert set(sgl_flashsample.__all__) - documented == {"NOISE_ABI", "__version__"}, "which are no functions"

    pictures = {picture.name for picture in RESULTS.glob("summary*")}
    assert (
        pictures and {picture.name for picture in (tmp_path / "site" / "benchmarks" / "results").iterdir()} == pictures
    )
    pages = {page.relative_to(tmp_path / "site"): page.read_text() for page in (tmp_path / "site").rglob("index.html")}
    for page, text in pages.items():
        for source in re.findall(r'(?:src|srcset)="(?!https?:|data:|/)([^"]+)"', text):
            assert (tmp_path / "site" / page.parent / source).exists(), f"{page}: {source}"
    leaving = re.compile(r'href="(?:\.\./)*(?:benchmarks|kernels|tests)/')
    assert [str(page) for page, text in pages.items() if leaving.search(text)] == []
    assert "<code>benchmarks/README.md</code>" in pages[Path("results/index.html")]


def test_the_worked_example_of_a_draw_prints_what_the_page_shows():
    blocks = dict(re.findall(r"^```(python|text)\n(.*?)^```$", text_of("docs/how/draw.md"), re.M | re.S))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(blocks["python"], "docs/how/draw.md", "exec"), {})
    assert printed.getvalue() == blocks["text"]


# --- numbers ----------------------------------------------------------------------------------------------------------


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def said(*claims: str) -> None:
    """README.md has these words, wherever its lines are broken."""
    text = " ".join(text_of("README.md").split())
    for claim in claims:
        assert claim in text, claim


def usual(row: dict) -> bool:
    """A server without drafts, deterministic inference, stages and replicas."""
    return not {"speculation", "deterministic", "dp"} & row.keys() and row.get("pp", 1) == 1


def percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{change:.0f}" if abs(change) >= 1 else f"{change:.1f}"


def test_the_readme_has_every_decided_cell_of_moving_traffic_and_says_how_many_are_not():
    cells = [row for row in rows("h200-traffic") if row.get("ratio", {}).get("low") is not None]
    decided = [row for row in cells if not row["ratio"]["low"] <= 1 <= row["ratio"]["high"]]
    found = {}
    for row in decided:
        of, low, high = (percent(row["ratio"][name]) for name in ("of", "low", "high"))
        found[row["model"], row["sampling"], row["clients"]] = of, f"{low} to {high}"
    (sixteen, first), (most, second) = (found.pop(("qwen3-8b", "trunc", clients)) for clients in (16, 256))
    (gain, interval), (greedy_gain, greedy_interval) = (
        found.pop(("qwen3-1.7b", *cell)) for cell in (("trunc", 16), ("greedy", 256))
    )
    assert not found
    said(
        f"of {len(cells)} cases {len(decided)} show a gain in tokens per second (99 % interval excludes 0), "
        f"{len(cells) - len(decided)} are undecided",
        f"{sixteen} % with 16 ({first} %) and {most} % with 256 clients ({second} %)",
        f"{gain} % with 16 clients, top-k and top-p ({interval} %)",
        f"{greedy_gain} % with 256, greedy ({greedy_interval} %, noisy)",
    )
    assert min(row["ratio"]["of"] for row in decided) > 1


def drafted(name: str) -> dict[tuple, dict[str, dict]]:
    """{(temperature, algorithm, model, batch): {backend: row}} of servers with drafts."""
    cells: dict[tuple, dict] = {}
    for row in rows(name):
        if row["section"] == "speed":
            key = row["temperature"], row["algorithm"], row["model"], row["batch"]
            cells.setdefault(key, {})[row["backend"]] = row
    return cells


def test_the_readme_says_where_drafts_without_a_model_lose():
    cells = drafted("h100-speculation")
    ratios = {
        key: cell.get("coupled", cell["greedy"])["tokens_s"] / cell["stock"]["tokens_s"] for key, cell in cells.items()
    }
    worst = min(ratios, key=lambda key: ratios[key])
    assert worst == (1.0, "NGRAM", "qwen3-1.7b", 1)
    said(f"with one request at temperature 1: {100 * (1 - ratios[worst]):.0f} % fewer tokens per second than stock")


def tokens_of(row: dict) -> float:
    return row["tokens_s"]


def test_the_readme_says_what_drafts_gain_over_sglangs_best_mode():
    over: dict[tuple[int, str, bool], list[float]] = {}
    others: dict[str, list[float]] = {}
    for gpus, name in ((1, "h200-speculation"), (2, "h200x2-speculation")):
        for (temperature, algorithm, model, batch), cell in drafted(name).items():
            assert batch in (1, 8, 32)
            best = max((cell[mode] for mode in ("stock", "rejection", "tree") if mode in cell), key=tokens_of)
            ours = cell.get("coupled", cell["greedy"] if algorithm == "NGRAM" else {})
            ratio = tokens_of(ours) / tokens_of(best)
            if algorithm == "EAGLE":
                over.setdefault((gpus, model, temperature > 0), []).append(ratio)
            elif (gpus, model) == (1, "qwen3-8b"):
                others.setdefault("NEXTN of 8B", []).append(ratio)
                assert algorithm == "NEXTN" and batch <= 8
            elif gpus == 2:
                others.setdefault("two GPUs", []).append(ratio)
                assert algorithm == "NEXTN"
            else:
                others.setdefault(algorithm, []).append(ratio)
                assert model == "qwen3-1.7b"
                assert ratio > 1 or 1 - ratio < max(one["tokens_s_spread"] / tokens_of(one) for one in (best, ours))
    words = {key: f"{min(ratios):.2f} to {max(ratios):.2f}" for key, ratios in (over | others).items()}
    below = {name: sum(ratio < 1 for ratio in ratios) for name, ratios in others.items()}
    assert below == {"NEXTN": 0, "NEXTN of 8B": 0, "EAGLE3": 0, "NGRAM": 1, "two GPUs": 3}
    said(
        f"Qwen3-8B's size: sampled {words[1, 'qwen3-8b', True]} times, greedy {words[1, 'qwen3-8b', False]}; "
        f"on two GPUs {words[2, 'qwen3-8b', True]} and {words[2, 'qwen3-8b', False]}. "
        f"NEXTN of that size, up to 8 requests, {words['NEXTN of 8B']}.",
        f"Qwen3-1.7B's size (noisy): EAGLE sampled {words[1, 'qwen3-1.7b', True]}, "
        f"greedy {words[1, 'qwen3-1.7b', False]}, below 1 with one request",
        f"NEXTN {words['NEXTN']}, EAGLE3 {words['EAGLE3']} (all drafts rejected), NGRAM {words['NGRAM']} "
        f"(below 1 once, within the spread); on two GPUs (off by default) NEXTN {words['two GPUs']}",
    )


def test_the_page_of_drafts_says_what_a_pass_of_few_ids_takes_and_where_tokens_come_faster():
    text = " ".join(text_of("docs/operate/speculation.md").split())
    cells = drafted("h200-speculation")
    one = cells[1.0, "EAGLE", "qwen3-1.7b", 1]
    hot, whole = (f"{one[name]['draft_step_us']:.0f}" for name in ("hot", "coupled"))
    assert f"a pass of Qwen3-1.7B's EAGLE layer took {hot} µs instead of {whole}" in text
    cells_of_all = [*cells.items(), *drafted("h200x2-speculation").items()]
    sampled = [cell for (temperature, *_), cell in cells_of_all if temperature]
    raced = [cell for cell in sampled if "rejection" in cell]
    faster = [cell for cell in raced if tokens_of(cell["coupled"]) > tokens_of(cell["rejection"])]
    assert f"coupled drafts were faster in {len(faster)} of {len(raced)} cells" in text
    large = [cell for (_, _, model, _), cell in cells.items() if model == "qwen3-8b" and "hot" in cell]
    over = [(cell["hot"]["covered"], cell["hot"]["tokens_s"] / cell["coupled"]["tokens_s"] - 1) for cell in large]
    assert not any(0.975 < covered < 0.99 for covered, _ in over)
    words = []
    for part in ([pair for pair in over if pair[0] >= 0.99], [pair for pair in over if pair[0] < 0.99]):
        shares, changes = ([round(100 * abs(value)) for value in values] for values in zip(*part, strict=True))
        words.append(f"by {min(changes)} to {max(changes)} % with {min(shares)} to {max(shares)} % covered")
    assert f"tokens per second rose {words[0]}, and fell {words[1]}" in text


def test_the_readme_says_how_many_cells_a_bench_decides_in_how_many_minutes():
    found: dict[tuple[str, str], dict[tuple, dict]] = {}
    for row in rows("h200-bench"):
        if "answer" in row:
            found.setdefault((row["model"], row["section"]), {})[row["sampling"], row["batch"]] = row
    first, second = ({cell: row["answer"] for cell, row in found["qwen3-8b", f"run {n}"].items()} for n in (1, 2))
    assert first == second and set(first.values()) == {"faster"}
    small = found["smollm2-135m", "run 1"]
    faster = {
        cell: float(re.findall(r"[\d.]+", row["verdict"])[0])
        for cell, row in small.items()
        if row["answer"] == "faster"
    }
    assert {sampling for sampling, _ in small.keys() - faster.keys()} == {"greedy"}
    said(
        f"two ten-minute runs at Qwen3-8B's size each found all {len(first)} settings faster",
        f"six minutes at SmolLM2's size found {len(faster)} of {len(small)} faster, "
        f"by {min(faster.values()):.0f} to {max(faster.values()):.0f} %",
    )


def test_the_readme_says_where_the_backend_does_not_help():
    load = {row["backend"]: row for row in rows("h100-load") if row["model"] == "qwen3-8b"}
    ours, stock = load["flashsample"], load["stock"]
    said(
        f"{ours['tokens_per_s']:,.0f} tokens/s, stock {stock['tokens_per_s']:,.0f}",
        f"99th percentile of a response's time {ours['answer_s_p99']:.1f} s, stock's {stock['answer_s_p99']:.1f} s",
    )

    def greedy(file: str) -> dict[tuple, float]:
        times: dict[tuple, dict] = {}
        for row in rows(file):
            if row["section"] == "stock" and row["sampling"] == "greedy" and usual(row):
                times.setdefault((row["model"], row["batch"]), {})[row["backend"]] = row["tpot_us"]
        return {key: time["flashsample"] / time["stock"] for key, time in times.items()}

    def least_to_most(*files: str) -> str:
        less = [1 - ratio for file in files for ratio in greedy(file).values()]
        return f"{100 * min(less):.0f} to {100 * max(less):.0f} % less"

    spreads: dict[int, float] = {}
    for row in rows("h200x2-serve"):
        if row["section"] == "stock" and row["sampling"] == "greedy" and usual(row):
            spreads[row["batch"]] = max(spreads.get(row["batch"], 0.0), row["spread_us"] / row["tpot_us"])
    assert all(1 - ratio > spreads[batch] for (_, batch), ratio in greedy("h200x2-serve").items())
    said(
        f"{least_to_most('h200-serve')} time on one GPU, {least_to_most('h200x2-serve')} on two "
        "(H200, Qwen3-8B's size, `--tp-size 2`)"
    )


def test_the_readme_says_what_dp_attention_gains_and_where_it_does_not():
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows("h200x2-serve"):
        if row["section"] == "stock" and row.get("dp"):
            cells.setdefault((row["sampling"], row["batch"]), {})[row["backend"]] = row
    over = {key: cell["flashsample"]["tpot_us"] / cell["stock"]["tpot_us"] - 1 for key, cell in cells.items()}
    less = [-change for change in over.values() if change < 0]
    ((key, worst),) = [one for one in over.items() if one[1] > 0]
    spread = max(row["spread_us"] for row in cells[key].values()) / cells[key]["stock"]["tpot_us"]
    assert key == ("greedy", 16)
    said(
        f"{100 * min(less):.0f} to {100 * max(less):.0f} % less time in {len(less)} of {len(over)} cells, "
        f"**{100 * worst:.0f} % more** in one ({key[1]} greedy requests; spread {100 * spread:.0f} %)"
    )


def test_no_servers_of_several_gpus_that_are_fused_by_default_were_slower_beyond_the_larger_spread():
    cells: dict[tuple, dict[str, dict]] = {}
    for file in ("h200x2-serve", "h200x4-serve"):
        for row in rows(file):
            if row["section"] == "stock":
                servers = row["model"], row["tp"], row["pp"], row.get("dp", 1)
                cells.setdefault((*servers, row["sampling"], row["batch"]), {})[row["backend"]] = row
    assert {(tp, pp, dp) for _, tp, pp, dp, *_ in cells} == support.MEASURED_RANKS.keys()
    for ours, stock in ((cell["flashsample"], cell["stock"]) for cell in cells.values()):
        assert ours["tpot_us"] - stock["tpot_us"] <= max(ours["spread_us"], stock["spread_us"])
    words = (
        "None that is fused by default was [measured](../results/index.md) slower than stock beyond the larger spread."
    )
    assert words in " ".join(text_of("docs/operate/several-gpus.md").split())


def test_the_readme_says_of_how_many_architectures_servers_were_run():
    result = json.loads((ROOT / "tests/proof/results/families.json").read_text())
    names = {row["architecture"] for row in result["rows"]}
    said(f"servers of [{len(names)} architectures](tests/proof/results/families.json), as Qwen3, Qwen3-MoE, Llama, ")
    assert {f"{name}ForCausalLM" for name in ("Qwen3", "Qwen3Moe", "Llama", "Gemma3", "Mistral")} <= names


def test_what_the_readme_calls_checked_is_on_the_page_of_proofs():
    proof = text_of("tests/proof/README.md")
    table = text_of("README.md").split("| counts as a failure | found |")[1].split("\n\n")[0]
    found = re.findall(r"\d+(?:\.\d+)? of [\d.,]*\d", table)
    assert len(found) == len(table.strip().splitlines()) - 1 + 2, "two rows have two paths"
    assert [words for words in found if words not in proof] == []
    ((met, missed, not_run),) = re.findall(r"(\d+) goals are met, (\d+) are missed, (\d+) were not run", proof)
    goals = sum(map(int, (met, missed, not_run)))
    said(
        f"Of {goals} goals (speed, memory, exactness) {met} are met, {missed} missed, none by a wrong token, "
        f"and {not_run} were not run"
    )


def test_the_readme_says_how_much_less_time_servers_take():
    """In batches that stay, on one GPU, of the least and of the most that a cell gains."""
    times: dict[tuple, dict] = {}
    for row in rows("h200-serve"):
        if row["section"] == "stock" and row["sampling"] in ("trunc", "greedy", "t1") and usual(row):
            times.setdefault((row["model"], row["sampling"], row["batch"]), {})[row["backend"]] = row["tpot_us"]
    less = [1 - time["flashsample"] / time["stock"] for time in times.values()]
    said(f"{100 * min(less):.0f} to {100 * max(less):.0f} % less time per token")


def test_the_readme_says_how_much_memory_a_server_took_and_what_bounds_it():
    (head,) = next(row for row in rows("h100-load") if row["model"] == "qwen3-8b" and "heads" in row)["heads"]
    said(
        f"{head['bytes'] / 1e9:.1f} GB for Qwen3-8B with 1,000 clients",
        f"{head['screen']['bytes'] / 1e9:.1f} GB of it an INT8 copy",
        f"at most {100 * MEMORY_SHARES[ScreenMode.AUTO]:.0f} % of the memory left by the weights",
        f"up to {step_graphs.MAX_PREPARED_BYTES + step_graphs.MAX_LATE_BYTES >> 20} MB of CUDA graphs",
    )


def test_the_pages_of_the_tuner_have_its_efforts_and_thresholds():
    lines = [line.strip("| ").split(" | ") for line in text_of("docs/tune/five-minutes.md").splitlines()]
    table = {line[0].strip("`"): line[1:4] for line in lines if line[0].strip("`") in plan.EFFORTS}
    for name, effort in plan.EFFORTS.items():
        budget = f"{effort.budget:.0f} s" if effort.budget < 3600 else f"{effort.budget / 3600:.0f} h"
        cap = str(effort.cap) if effort.cap < 10**9 else "all"
        assert table[name][:2] == [budget, cap] and f"up to {effort.policy.most} rounds" in table[name][2]
    policy, text = plan.EFFORTS["full"].policy, " ".join(text_of("docs/tune/decisions.md").split())
    assert "except in `quick`, where they gained nothing, proposals" in text
    assert [name for name, effort in plan.EFFORTS.items() if effort.proposed] == ["full"]
    assert f"beyond {100 * policy.tie:.0f} % (or {policy.tie_us:g} µs)" in text
    assert f"only for a gain of more than {100 * policy.min_gain:.0f} %" in text
    assert f"costs more than {100 * decide.TRANSFER_REGRET:.0f} %" in text
    assert f"times within {100 * verify.WITHIN:.0f} %" in text_of("docs/tune/five-minutes.md")


def test_pages_say_that_servers_race_the_screen_exactly_while_no_shipped_table_names_its_machine_code():
    """Which ones do not is listed in ``test_staleness.py``."""
    files = [*defaults.SHIPPED.glob(f"{FILE_PREFIX}*.json"), ROOT / "deploy" / "kubernetes" / "table.json"]
    tables = [load_table(file)[0] for file in files]
    none_does = not any(table.has_code for table in tables)
    sentences = {
        "README.md": "of earlier kernels: servers use them, and measure at their start where the screen is faster",
        "docs/tune/shipping.md": "as all shipped ones and that of `deploy/kubernetes` are",
    }
    for page, sentence in sentences.items():
        assert (sentence in " ".join(text_of(page).split())) == none_does, page


def test_pages_say_which_batches_a_race_at_the_start_has_and_how_long_it_takes():
    assert screen_race.MOST_ROWS == {"plain": 64, "greedy": 64, "truncate": 32, "edit": 32, "edit+truncate": 8}
    text = " ".join(text_of("docs/tune/shipping.md").split())
    seconds = f"{screen_race.MAX_SECONDS:.0f} s"
    rows = "plain and greedy batches of up to 64 rows, truncated or edited ones of up to 32, both of up to 8, in"
    assert f"{rows} {seconds} at most" in text
    assert f"a race of {seconds} at most at the start" in text_of("docs/operate/variables.md")


def test_the_support_matrix_is_that_of_the_result_files_and_of_the_tests():
    matrix = text_of("README.md").split("## Support")[1].split("## Run it")[0]
    lines = [line.strip("| ").split(" | ") for line in matrix.splitlines() if line.startswith("| ")]
    measured, tested = ({name: line[place] for name, *line in lines if len(line) > 2} for place in (0, 1))
    results = [json.loads(file.read_text()) for file in RESULTS.glob("h*.json")]
    assert measured["cards"] == ", ".join(defaults.MEASURED_ON)
    for result in results:
        assert any(name in result["env"]["device"] for name in defaults.MEASURED_ON)
    runs = [run for result in results for run in (result["env"], *result.get("runs", ()))]
    assert measured["SGLang"] == ", ".join(sorted({run["sglang"] for run in runs if run.get("sglang")}))
    pinned = re.findall(r"^sglang==(.*)$", bootstrap.CPU_REQUIREMENTS_WITHOUT_DEPENDENCIES.read_text(), re.M)
    others = re.findall(r"sglang==([\d.]+)", str(bootstrap.OTHER_VERSIONS))
    assert tested["SGLang"] == ", ".join(sorted({*pinned, *others}))
    oldest, newest = (".".join(map(str, version)) for version in (versions.OLDEST, versions.NEWEST))
    said(f"SGLang {oldest} to {newest}")
    servers = {row["model"] for result in results for row in result.get("rows", ()) if "tpot_us" in row}
    assert servers == {"qwen3-1.7b", "qwen3-8b", "qwen3-30b-a3b", "smollm2-135m"}
    assert "servers: Qwen3 1.7B, 8B and 30B-A3B, SmolLM2" in measured["models"]
