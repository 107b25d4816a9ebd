"""The benchmarks run here as far as a machine without a GPU lets them, so that they run at once where there is one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import CUDA

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.skipif(CUDA, reason="the dry run is interpreted")
def test_the_feature_benchmark_runs_every_mode_and_its_tables_follow_from_its_file(tmp_path):
    import features
    import tables

    out = tmp_path / "features.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "features.py"), "--dry-run", "--out", str(out)]
    subprocess.run([*command, "--profiles", "typical", "--batches", "2"], check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert {row["mode"] for row in result["rows"] if row["path"] == "fused"} == set(features.MODES)
    assert not any(row["differ_from_reference"] for row in result["rounds"])
    assert set(tables.TRUNCATIONS) | set(tables.EDITS) == set(features.MODES)
    for table in (tables.truncation_table, tables.edits_table, tables.searched_table):
        lines = table(out).splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert table(tmp_path / "absent.json") == tables.NOT_MEASURED


@pytest.mark.skipif(CUDA, reason="the dry run is interpreted")
def test_the_screened_benchmark_compares_every_kind_and_its_tables_follow_from_its_file(tmp_path):
    import screened
    import tables

    out = tmp_path / "screened.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "screened.py"), "--dry-run", "--out", str(out)]
    subprocess.run([*command, "--only", "tokens"], check=True, capture_output=True)
    subprocess.run([*command, "--only", "speed", "distribution", "--keep"], check=True, capture_output=True)
    sections = json.loads(out.read_text())["sections"]
    assert set(sections) == set(screened.SECTIONS)
    rows = sections["tokens"]["rows"]
    cells = [(value, False) for value in screened.TEMPERATURES]
    cells += [(value, True) for value in screened.LIMITED_TEMPERATURES]
    assert {(row["kind"], row["temperature"], row["limited"]) for row in rows} == {
        (kind, *cell) for kind in screened.KINDS for cell in cells
    }
    assert all(row["different"] == 0 and row["candidates_per_row"] >= 1.0 for row in rows)
    assert {row["path"] for row in sections["speed"]["rows"]} >= {"gemm", "fused", "screened"}
    assert abs(sections["distribution"]["deviations_from_chance"]) < 6
    lines = tables.screened_tokens_table(out).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + len(screened.KINDS)
    for row in sections["speed"]["rows"]:
        row |= {"us": 2.0, "over_floor": 1.0}  # a dry run times nothing
    out.write_text(json.dumps({"sections": sections}))
    table = tables.screened_table(out)
    assert "2 (1.000 of the floor; 1.000 of fused; " in table and "2 (1.000 of fused; 0 rows left)" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert tables.screened_table(tmp_path / "absent.json") == tables.NOT_MEASURED


@pytest.mark.skipif(CUDA, reason="the dry run is interpreted")
def test_a_step_that_is_told_the_leaders_draws_the_same_tokens_and_reads_no_more(tmp_path):
    out = tmp_path / "hot.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "hot_bound.py"), "--dry-run", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    for row in json.loads(out.read_text())["rows"]:
        read = row["groups_read"]
        assert row["same_tokens"] and row["B"] <= read["leader known"] <= read["screened"]


def test_a_hot_set_is_sized_by_what_a_known_leader_saves_and_what_a_group_costs():
    import hot_bound

    us = {"screened": 160.0, "leader known": 150.0, "first pass": 145.0}
    hits = hot_bound.zipf(1000)
    sized = hot_bound.sized(us, 1000, (0.03, 0.015), hits)
    by_hand = [-10.0 * hits(size) + 0.015 * size for size in range(1001)]
    best = min(range(1001), key=lambda size: by_hand[size])
    assert 0 < sized["hot_groups"] == best < 1000
    assert sized["saves_us"] == round(-by_hand[best], 3) and sized["saves"] == round(-by_hand[best] / 160.0, 5)
    nothing = hot_bound.sized(us | {"leader known": 160.0}, 1000, (0.03, 0.015), hits)
    assert nothing["hot_groups"] == 0 and nothing["saves_us"] == 0


def test_the_table_of_what_a_hot_set_could_save_follows_from_its_file(tmp_path):
    import tables

    out = tmp_path / "hot.json"
    row = {"B": 8, "temperature": 0.7, "us": {"screened": 160.0, "leader known": 158.5, "first pass": 149.0}}
    row |= {"groups_read": {"screened": 40.2, "leader known": 20.0}}
    row |= {"sized": {"hot_groups": 9, "hit": 0.25, "saves_us": 0.31, "saves": 0.002}}
    out.write_text(json.dumps({"rows": [row]}))
    assert tables.hot_bound_table(out).splitlines()[-1] == (
        "| 8, 0.7 | 160.0 (40) | 158.5 (20) | 149.0 | 9 groups, 25% of the tokens: 0.31 us |"
    )
    assert tables.hot_bound_table(tmp_path / "absent.json") == tables.NOT_MEASURED


def test_the_table_of_servers_with_a_screen_has_their_ratio_and_whether_answers_are_the_same(tmp_path):
    import tables

    out = tmp_path / "serve.json"
    row = {"model": "m", "sampling": "t1", "batch": 8}
    on = row | {"backend": "screen on", "tpot_us": 80.0, "same_answers": 8}
    out.write_text(json.dumps({"rows": [row | {"backend": "screen off", "tpot_us": 100.0}, on]}))
    assert tables.screened_serve_table(out).splitlines()[-1] == (
        "| m, temperature 1 | 80 us (0.800; 8 of 8 answers the same) |"
    )
    assert tables.screened_serve_table(tmp_path / "absent.json") == tables.NOT_MEASURED


def test_the_host_time_of_a_server_alone_is_of_the_steps_between_two_lines_of_its_log(tmp_path, monkeypatch):
    """40 us of each step in long answers, 90 in short ones; the two steps that a reading of the log asks for, 65."""
    import serve

    class FakeServer:
        def __init__(self, model, arguments, *, backend, log, environment):
            assert backend == "flashsample" and environment["FLASHSAMPLE_SCREEN"] == "off"
            assert (model / "config.json").exists()
            self.log, self.steps, self.us = log, 0, 0.0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def log_text(self):
            return f"max_total_num_tokens={serve.CACHE_TOKENS}"

        def log_lines(self, wanted):
            return [
                f"] flashsample: fused 1 rows in 1 batches; host {self.us / max(1, self.steps)} us per batch over "
                f"{self.steps:,} batches"
            ]

        def generate(self, *, input_ids, sampling_params):
            tokens = sampling_params["max_new_tokens"]
            self.steps += tokens
            self.us += tokens * {2: 65.0, serve.SHORT: 90.0}.get(tokens, 40.0)
            return [{"output_ids": [0] * tokens} for _ in input_ids]

    monkeypatch.setattr(serve, "Server", FakeServer)
    monkeypatch.setattr(serve.time, "sleep", lambda seconds: None)
    ((row,),) = serve.measure_host("tiny", [3], ["t1"], tmp_path, "off")
    assert row["host_us"] == pytest.approx(40.0, abs=0.2) and row["host_us_short"] == pytest.approx(90.0, abs=0.5)
    assert (row["batch"], row["sampling"], row["screen"]) == (3, "t1", "off")


def test_a_server_benchmark_that_is_ended_leaves_what_it_has_measured(tmp_path, monkeypatch):
    import serve

    def measured(name, batches, samplings, logs, screen):
        yield [{"model": name, "sampling": samplings[0], "batch": batches[0], "screen": screen, "host_us": 40.0}]
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "measure_host", measured)
    monkeypatch.setattr(serve.measure, "environment", lambda: {"nvidia_smi": {}})
    monkeypatch.setattr(serve.importlib.metadata, "version", lambda name: "0")
    out = tmp_path / "host.json"
    monkeypatch.setattr(sys, "argv", ["serve.py", "--alone", "auto", "--models", "tiny", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        serve.main()
    found = json.loads(out.read_text())
    assert [row["host_us"] for row in found["rows"]] == [40.0]
    assert list(found["env"]["runs"]) == ["tiny, t1"], "and not of what was not"


def test_the_tables_name_every_sampling_of_the_server_benchmark():
    import serve
    import tables

    assert set(tables.SAMPLING_NAMES) == set(serve.SAMPLING)


KERNEL_FIELDS = {"D", "V", "B", "mode", "path", "us", "us_spread", "config"}


@pytest.mark.skipif(CUDA, reason="the dry run is interpreted")
def test_the_kernel_benchmark_draws_with_every_path_and_says_what_cannot_run(tmp_path):
    from contenders import MODES, PATHS

    import kernels
    from sgl_flashsample.work import OWN_PATHS

    out = tmp_path / "kernels.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--dry-run", "--out", str(out)]
    subprocess.run([*command, "--shapes", "48x777", "--batches", "3"], check=True, capture_output=True)
    result = json.loads(out.read_text())
    assert set(result) == {"env", "floor_tb_s", "rows"}
    assert all(set(row) == KERNEL_FIELDS and (row["D"], row["V"], row["B"]) == (48, 777, 3) for row in result["rows"])
    found = {(row["mode"], row["path"]) for row in result["rows"]}
    assert found >= {(mode, path) for mode in MODES for path in ("gemm", *OWN_PATHS)}
    assert found >= {(mode, path) for mode in ("plain", "greedy") for path in ("multinomial_compiled", "exp_race")}
    missing = {gap["path"].split()[0]: gap["reason"] for gap in result["env"]["not_run"]}
    assert all(missing.values())
    for path in set(PATHS) - {path for _, path in found}:
        assert path in missing or (path.startswith("flashinfer") and "flashinfer" in missing)
    greedy = [same for same in result["env"]["agreement"] if same["mode"] == "greedy"]
    assert greedy and all(same["same"] == same["of"] for same in greedy)

    arguments = result["env"]["arguments"]
    assert kernels.resumed(out, arguments) == result
    with pytest.raises(ValueError, match="was made with"):
        kernels.resumed(out, arguments | {"batches": [1]})
    out.write_text("{}")
    with pytest.raises(ValueError, match="no result to resume"):
        kernels.resumed(out, arguments)


def test_a_row_is_the_fastest_form_of_a_path_and_the_gemm_a_row_of_every_mode():
    from contenders import Shape
    from rivals import Contender
    from sgl_flashsample.autotune.measure import Timing

    import kernels

    forms = [Contender(*names, lambda step: None) for names in (
        ("gemm", "gemm", "mm"), ("exp_race", "plain", "eager"), ("exp_race", "plain", "compiled"),
        ("exp_race", "plain", "failed"), ("fused", "trunc", "tile"),
    )]  # fmt: skip
    times = dict(zip((form.name for form in forms if form.form != "failed"), (3.0, 9.0, 7.0, 5.0), strict=True))
    timings = {name: Timing(us, 0.5, 9) for name, us in times.items()}
    how = {forms[2].name: "eager"}
    rows = kernels.rows_of(Shape(8, 9), 2, forms, timings, how, ["plain", "trunc"])
    assert [(row["mode"], row["path"], row["us"], row["config"]) for row in rows] == [
        ("plain", "gemm", 3.0, "mm"),
        ("plain", "exp_race", 7.0, "compiled; eager, CUDA events"),
        ("trunc", "gemm", 3.0, "mm"),
        ("trunc", "fused", 5.0, "tile"),
    ]


# D, V, B, mode: microseconds per path. A rival is faster than our best path in two rows: the GEMM, at B=128 and with a
# truncation.
TIMES = {
    (4096, 151936, 1, "plain"): {
        "gemm": 300.0, "fused": 280.0, "logits": 310.0, "flashinfer_gumbel": 350.0, "multinomial_compiled": 400.0,
        "exp_race": 390.0,
    },
    (4096, 151936, 128, "plain"): {"gemm": 310.0, "fused": 380.0, "logits": 330.0, "flashinfer_gumbel": 400.0},
    (2048, 1000, 2, "trunc"): {"gemm": 4.0, "fused": 5.0, "screened": 4.8, "flashinfer_topk_topp": 5.1},
    (2048, 1000, 2, "greedy"): {"gemm": 6.0, "fused": 5.0, "exp_race": 6.5},
}  # fmt: skip


@pytest.fixture
def measured(tmp_path) -> Path:
    rows = [
        {"D": d, "V": v, "B": b, "mode": mode, "path": path, "us": us, "us_spread": 0.1, "config": f"tile of {path}"}
        for (d, v, b, mode), times in TIMES.items()
        for path, us in times.items()
    ]
    next(row for row in rows if row["B"] == 128 and row["path"] == "fused")["config"] += "; picked by the table"
    out = tmp_path / "measured.json"
    out.write_text(json.dumps({"env": {"device": "a device"}, "floor_tb_s": 4.6, "rows": rows}))
    return out


def test_the_report_names_each_loss_and_no_other(measured):
    import report

    result = report.load(measured)
    found = {(loss.shape, loss.batch, loss.mode, loss.rival): loss for loss in report.losses(result)}
    assert set(found) == {((4096, 151936), 128, "plain", "gemm"), ((2048, 1000), 2, "trunc", "gemm")}
    loss = found[(4096, 151936), 128, "plain", "gemm"]
    assert (loss.ours, loss.ours_us, loss.rival_us, loss.within_spread) == ("logits", 330.0, 310.0, False)
    assert loss.factor == 330 / 310
    page = report.page([result], {})
    assert report.loss_table(result).count("<tr class=row>") == 2
    assert "<td>1.200</td>" in report.loss_table(result)  # 4.8 over 4.0
    assert "<td>fused</td><td>380.0</td><td>logits</td><td>330.0</td>" in report.choice_table(result)
    for mode, path in {(mode, path) for (*_, mode), times in TIMES.items() for path in times}:
        assert f"<td>{report.name_of(path, mode)}</td>" in report.row_table(result).replace("&#x27;", "'")
    assert all(f"<td>{us:.2f}</td>" in page for times in TIMES.values() for us in times.values())


def test_the_report_shows_what_the_screened_path_gains_over_our_others_and_the_memory_of_its_copy(measured):
    import report

    table = report.screen_table(report.load(measured))
    assert table.count("<tr class=row>") == 1, "rows in which it was measured"
    assert "<td>2</td><td>screened</td><td>4.8</td><td>fused</td><td>5.0</td><td>4.0%</td>" in table
    assert "<td>2,060,000</td><td>50.3%</td>" in table
    data = json.loads(measured.read_text())
    data["rows"] = [row for row in data["rows"] if row["path"] != "screened"]
    measured.write_text(json.dumps(data))
    assert "was not measured" in report.screen_table(report.load(measured))


def test_the_report_judges_each_demand_by_our_fastest_path(measured):
    import report

    verdicts = {bar.what: (bar.verdict, bar.figure) for bar in report.bars(report.load(measured))}
    main = "4096 x 151936, temperature 1, B={}: {}"
    gemm, gumbel = report.NAMES["gemm"], report.NAMES["flashinfer_gumbel"]
    floor = (4096 * 151936 * 2 + 4096 * 2 + 8) / 4.6e6
    verdict, figure = verdicts[main.format(1, "ours / floor")]
    assert verdict == "met" and figure == pytest.approx(280 / floor)
    assert verdicts[main.format(1, f"ours / {gemm}")] == ("met", 280 / 300)
    assert verdicts[main.format(128, f"ours / {gemm}")] == ("met", 330 / 310)
    assert verdicts[main.format(128, f"{gumbel} / ours")] == ("missed", 400 / 330)
    assert verdicts[main.format(64, f"ours / {gemm}")] == ("not measured", None)
    assert verdicts[f"2048 x 1000, greedy, B=2: ours / {gemm}"] == ("met", 5 / 6)


def test_the_page_needs_no_network_and_the_plots_show_every_path(measured):
    pytest.importorskip("matplotlib")
    import plots
    import report

    result = report.load(measured)
    drawn = plots.draw(result)
    page = report.page([result], {result.name: {plot.title: plot.svg for plot in drawn}})
    assert [plot.slug for plot in drawn] == ["time", "floor", "share", "roofline"]
    assert all(plot.png.startswith(b"\x89PNG") and plot.svg in page for plot in drawn)
    for mode, path in {(mode, path) for (*_, mode), times in TIMES.items() for path in times}:
        assert f">{report.name_of(path, mode)}</text>" in drawn[0].svg
    links = re.findall(r"(?:src|href|action)=[\"']?([^\"' >]*)|url\(([^)]*)|(@import)", page)
    assert links and all("".join(link).startswith("#") for link in links)
    assert plots.INK not in page


@pytest.mark.parametrize(
    "text, complaint",
    [
        (None, "No such file"),
        ("{", "is no result of benchmarks/kernels.py"),
        ("[]", "is no result of benchmarks/kernels.py"),
        ('{"env": {}, "floor_tb_s": null, "rows": []}', "expected both of a measured result"),
        ('{"env": {"arguments": {"dry_run": true}}, "floor_tb_s": null, "rows": []}', "is a dry run"),
        ('{"env": {}, "floor_tb_s": 4.5, "rows": [{"D": 1}]}', "row 0 has no V"),
    ],
)
def test_what_is_no_result_gives_one_line(tmp_path, text, complaint, monkeypatch):
    import report

    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["report.py", str(path), "--out", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit) as stopped:
        report.main()
    message = str(stopped.value)
    assert complaint in message and message.startswith("error: ") and "\n" not in message
    assert not (tmp_path / "page.html").exists()
