"""``tune plan``, ``run``, ``verify`` and ``report``: what they print, exit codes and errors."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from lab.simulated import measuring_on
from matplotlib import image
from tune_examples import H200, HEAD, PLAIN, QUICK
from tuned_tables import make_entry, make_table

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'sgl-flashsample[tune]'")

from sgl_flashsample import autotune
from sgl_flashsample.autotune import cli, report
from sgl_flashsample.autotune.decide import entry_of
from sgl_flashsample.autotune.labels import DEVICES, known_device
from sgl_flashsample.autotune.plan import EFFORTS, StudyKey
from sgl_flashsample.autotune.space import FUSED
from sgl_flashsample.cli import main
from sgl_flashsample.defaults import SHIPPED
from sgl_flashsample.kernels.config import ScreenConfig, TileConfig
from sgl_flashsample.tables import lookup
from sgl_flashsample.tables.schema import config_fields

SHAPE = ("--vocab", 128_256, "--hidden", 4096)
WRONG = "plain/fused-16x128x128-w4-s6-c1-r16-one"


class Hidden:
    """A finder that hides packages, as if they were not installed."""

    def __init__(self, packages: list[str]) -> None:
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_plan_says_what_is_tried_how_long_it_takes_and_where_a_server_looks(command, tmp_path):
    code, out, err = command("plan", "--vocab", 151_936, "--hidden", 4096, "--out", tmp_path, "--processes", 1)
    assert (code, err) == (0, "")
    assert "1872 kernels to compile in 1 process," in out and "85 races" in out
    seconds = int(re.search(r"total (\d+) s", out)[1])
    covered = int(re.search(r"the budget of 285 s covers about (\d+) of the 1872 configurations", out)[1])
    assert seconds > 2000 and covered < 400, "what it would take, not what it may take"
    assert f"{tmp_path}/fs2-NVIDIA_H200-V151936-D4096-tp1-bf16.json" in out
    assert "assumed: there is no GPU here" in out or torch.cuda.is_available()
    assert "covers all of it" in command("plan", *SHAPE, "--processes", 64)[1]


@pytest.mark.parametrize(
    "named, name, capability, multiprocessors",
    [
        ("L40S", "NVIDIA L40S", "8.9", 142),
        ("l4", "NVIDIA L4", "8.9", 58),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", "8.9", 128),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", "8.9", 142),
        ("A10", "NVIDIA A10", "8.6", 72),
        ("A100", "NVIDIA A100-SXM4-80GB", "8.0", 108),
        ("H20", "NVIDIA H20", "9.0", 78),
        ("GH200", "NVIDIA GH200 480GB", "9.0", 132),
        ("H100", "NVIDIA H100 80GB HBM3", "9.0", 132),
        ("H100 PCIe", "NVIDIA H100 PCIe", "9.0", 114),
        ("GB200", "NVIDIA GB200", "10.0", 152),
    ],
)
def test_a_plan_can_be_of_a_card_that_is_not_here(command, named, name, capability, multiprocessors):
    code, out, err = command("plan", *SHAPE, "--device", named, "--json")
    assert (code, err) == (0, "")
    device = json.loads(out)["device"]
    assert (device["name"], device["cc"], device["sms"]) == (name, capability, multiprocessors)


def test_every_card_is_found_by_its_own_name_and_is_the_one_that_shipped_tables_were_measured_on():
    assert all(known_device(name) is device for name, device in DEVICES.items())
    tables = [table for _, table, _ in lookup.tables_in(SHIPPED) if table is not None]
    assert tables and all(table.device == DEVICES[table.device.name] for table in tables)


def test_a_plan_as_json_has_every_study(command):
    _, out, _ = command("plan", "--vocab", 32_000, "--hidden", 2048, "--device", "a100", "--json")
    plan = json.loads(out)
    assert plan["device"]["cc"] == "8.0" and plan["compiles"] == sum(study["trials"] for study in plan["studies"])
    kinds = ("plain", "truncate", "edit", "edit+truncate")
    assert {study["study"].split("/")[0] for study in plan["studies"]} == {
        *kinds,
        *(f"{kind}+screen" for kind in kinds),
    }
    assert all(0 < study["trials"] <= study["space"] for study in plan["studies"])
    seconds = plan["seconds"]
    assert seconds["total"] == pytest.approx(seconds["start"] + seconds["search"] + seconds["race"])


def test_a_shard_is_planned_and_a_line_says_where_no_server_uses_its_table(command):
    code, out, err = command("plan", "--vocab", 151_936, "--hidden", 4096, "--tp", 8)
    assert code == 0 and not err and "V18992-D4096-tp8-bf16.json" in out
    code, _, err = command("plan", "--vocab", 202_048, "--hidden", 5120, "--tp", 8)
    assert code == 0 and err == (
        "warning: servers with --tp 8 take built-in kernel settings for this head, and no table: each rank has 25256 "
        "token ids, which is not a multiple of 16\n"
    )


def test_a_model_is_read_from_its_config(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "hidden_size": 64, "dtype": "float16"}))
    for model in ((tmp_path,), ("--model-path", tmp_path), (tmp_path / "config.json",)):
        assert "V1000-D64-tp1-fp16.json" in command("plan", *model, "--effort", "quick")[1]
    assert command("plan", tmp_path, "--model-path", tmp_path)[2] == "error: the model is given twice\n"


@pytest.mark.slow
def test_a_run_a_verification_and_a_report_over_a_simulated_device(command, tmp_path, simulated, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = simulated(faults={WRONG: "wrong"})
    arguments = (*SHAPE, "--effort", "quick", "--batch-sizes", "1,64", "--compilers", 1, "--out", tmp_path / "out")
    code, out, _ = command("run", *arguments, "--json", device=device)
    facts = json.loads(out)
    assert (code, facts["status"], facts["complete"]) == (0, "done", True)
    code, out, _ = command("verify", facts["file"], device=device)
    assert code == 0 and "none slower than the built-in choice" in out
    sizes = json.loads(command("verify", facts["file"], "--json", device=device)[1])["sizes"]
    assert all(one["us"] > 0 and one["reason"] == "" for one in sizes) and len(sizes) == 20
    assert command("show", facts["file"])[0] == 0
    code, out, _ = command("report", facts["file"])
    page = Path(out.strip())
    answer = json.loads(command("report", facts["file"], "--json")[1])
    assert answer == {"file": facts["file"], "page": str(page)}
    assert code == 0 and page == Path(Path(facts["file"]).with_suffix(".html").name), "in the working directory"
    text = page.read_text(encoding="utf-8")
    assert_self_contained(text)
    for part in ("NVIDIA H200", WRONG, "incorrect", "default", "gemm", "Choices: microseconds"):
        assert part in text, part
    assert text.count("Plotly.newPlot") >= 3
    assert "up to date" in command("run", *arguments, device=device)[1]
    code, out, _ = command("run", *arguments, "--force", device=device)
    assert code == 0 and out.endswith("\nits times are simulated: no server uses it\n")
    code, out, _ = command("run", *arguments, "--batch-sizes", 1, "--force", device=simulated(simulated=False))
    serve = "sglang serve --model-path MODEL --sampling-backend flashsample\n"
    assert code == 0 and out.endswith(f"\nserve with it: FLASHSAMPLE_TUNED_DIR={tmp_path / 'out'} {serve}")


@pytest.mark.slow
def test_a_report_shows_what_decides_in_a_study():
    key = StudyKey(FUSED, PLAIN, 16)
    trials = [
        {
            "path": "fused",
            "config": config_fields(config),
            "us": {"1": 100.0 + 50.0 * (config.num_warps == 8) + place / 100},
        }
        for place, config in enumerate(QUICK.space(key).points)
    ]
    trials.append({"path": "fused", "config": {"block_b": 3}, "us": {}, "reason": "compile"})
    trials[3] |= {"us": {}, "reason": "runtime"}
    history, importances = report.study_figures(QUICK, str(key), trials[:-1])
    assert len(history.data[0].y) == len(trials) - 2 and importances.data[0].y[-1] == "num_warps"
    assert len(list(report.study_figures(QUICK, str(key), trials[:4]))) == 1, "too little is known"
    assert list(report.study_figures(QUICK, str(key), trials)) == [], "a configuration that is none"
    assert list(report.study_figures(QUICK, "sort/fused/16", trials)) == []


class Page(html.parser.HTMLParser):
    """The text of a page outside of its scripts, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text, self._script = "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._script = tag in ("script", "style")
        self.loads += [tag] if tag in ("link", "img", "iframe") else []
        self.loads += [name for name, _ in attributes if name in ("src", "href", "onload")]

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        self.text += "" if self._script else data + "\n"


def assert_self_contained(text: str) -> None:
    assert Page(text).loads == [] and text.count("<script") > 1


EVIL = "<script>alert(1)</script>"
TABLE = make_table(
    env={"note": EVIL},
    measure={"screen": {"bytes": 532_000_000, "rows": 64}},
    entries=[
        make_entry("plain", 1, TileConfig(16, 128, 256, 4, 3), us=100.0, gain=0.1, others={"gemm+flashinfer": 250.0}),
        make_entry("plain+screen", 8, ScreenConfig(8, 64, 256, 4, 4), us=60.0, others={"fused": 100.0, "logits": 80.0}),
        make_entry("plain+screen", 32, TileConfig(16, 128, 256, 4, 3), us=100.0, others={"screened": 120.0, EVIL: 1.0}),
        make_entry("plain+screen", 64, ScreenConfig(8, 64, 256, 4, 4), us=60.0),
    ],
)


def test_a_report_says_what_won_where_and_by_how_much_and_shows_names_as_text():
    text = Page(report.page(TABLE, None)).text
    assert "take something else than the built-in choice, by 0.0% to 10.0% faster" in text
    assert "The fastest GEMM with a sampler takes 2.50 times as long (1 raced)." in text
    assert "Of batches with a screen, 2 of 3 sizes take it." in text
    assert "A screen for up to 64 rows takes 532,000,000 bytes, 50.6% of the LM head's 1,050,673,152." in text
    assert [report.screen_gain(entry) for entry in TABLE.entries[1:]] == ["25.0%", "-20.0%", ""]
    assert "The log of the trials is not beside the table." in text and EVIL in text
    page = report.page(TABLE, None)
    assert EVIL not in page and "alert(1)" in page
    unknown = report.page(msgspec.structs.replace(TABLE, measure={}), None)
    assert "Its memory is not in the table." in unknown
    assert "with a screen" not in Page(report.page(make_table(), None)).text


@pytest.mark.parametrize("others, shown", [(None, "?"), (0, "0"), (5, "5")])
def test_a_report_says_against_how_many_other_configurations_each_choice_was_raced(others, shown):
    entry = msgspec.structs.replace(TABLE.entries[0], against=others)
    page = report.page(msgspec.structs.replace(TABLE, entries=[entry], confirmed={}), None)
    lines = page.partition("<summary>plain</summary>")[2].partition("</table>")[0].split("<tr>")[1:]
    head, cells = (re.findall(r"<t[hd][^>]*>([^<]*)", line) for line in lines)
    assert cells[head.index("raced against")] == shown


BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium-headless-shell or chromium")
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.full)])
def test_a_report_in_a_browser_fits_its_window_and_shows_its_figures(tmp_path, scheme):
    """The page measures itself: what sticks out of the window, and what each figure has drawn. The screenshot is that
    of a light or of a dark page, with colours of the heatmap on it."""
    (shipped, *_) = [table for _, table, _ in lookup.tables_in(lookup.SHIPPED) if table is not None]
    page = tmp_path / "report.html"
    measure = """<script>addEventListener("load", () => setTimeout(() => {
        const wide = [...document.querySelectorAll("body *")].filter(
            e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1);
        document.title = JSON.stringify({
            width: document.documentElement.scrollWidth, window: innerWidth,
            wide: wide.map(e => e.tagName + "." + e.getAttribute("class")),
            cells: document.querySelectorAll(".heatmaplayer text").length,
            lines: document.querySelectorAll(".scatterlayer .js-line").length,
            texts: [...document.querySelectorAll("svg text")].map(e => e.textContent)});
    }, 500))</script></html>"""
    page.write_text(report.page(shipped, None).replace("</html>", measure))
    command = [BROWSER, "--no-sandbox", "--disable-gpu", "--window-size=900,1400", "--virtual-time-budget=8000"]
    command += ["--blink-settings=preferredColorScheme=" + ("0" if scheme == "dark" else "1")]
    dump = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    facts = json.loads(html.unescape(re.search(r"<title>(\{.*?\})</title>", dump.stdout).group(1)))
    assert facts["width"] <= facts["window"] and facts["wide"] == []
    assert facts["cells"] >= 85 and facts["lines"] >= 2
    assert not {"null", "undefined", "NaN"} & set(facts["texts"])
    picture = tmp_path / "report.png"
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    pixels = image.imread(picture)[..., :3]
    background = pixels[-1, -1]
    assert (background < 0.3).all() if scheme == "dark" else (background > 0.9).all()
    fused = tuple(int(report.COLOURS["fused"][place : place + 2], 16) / 255 for place in (1, 3, 5))
    assert (abs(pixels - fused) < 0.02).all(-1).mean() > 0.02


def test_a_report_knows_of_confirmed_sizes_what_the_log_says(tmp_path, simulated, command):
    arguments = (*SHAPE, "--effort", "quick", "--batch-sizes", "64", "--compilers", 1, "--out", tmp_path)
    assert command("run", *arguments, device=simulated())[0] == 0
    (file,) = tmp_path.glob("fs2*.json")
    (log,) = tmp_path.glob("fs2*.trials.jsonl")
    assert len(report.page(report.Table.loads(file.read_text()), log)) > 4e6
    table = report.Table.loads(file.read_text())
    events = [json.loads(line) for line in log.read_text().splitlines()]
    logged = [entry_of(event) for event in events if event.get("event") == "decided"]
    with_log, without = ({str(one.kind): one for one in report.decisions(table, log)} for log in (logged, []))
    assert with_log.keys() == without.keys() and all(one.us for one in without.values())
    confirmed = next(iter(table.confirmed))
    assert with_log[confirmed].entry.others.keys() > without[confirmed].entry.others.keys() == {"gemm"}
    assert with_log[confirmed].confirmed and with_log[confirmed].entry.checked


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: command (see `sgl-flashsample tune --help`)"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["run"], "give a model's folder or config.json, or --vocab and --hidden"),
        (["plan", "/nonexistent/model"], "neither a model's folder nor a config.json"),
        (["plan", "--vocab", "0", "--hidden", "64"], "--vocab is 0"),
        (["plan", "--vocab", "64", "--hidden", "64", "--dtype", "int8"], "--dtype is 'int8'"),
        (["plan", "--vocab", "64", "--hidden", "64", "--device", "abacus"], "--device is 'abacus'"),
        (["run", "--vocab", "64", "--hidden", "64", "--budget", "soon"], "'soon' is no time"),
        (["run", "--vocab", "64", "--hidden", "64", "--batch-sizes", "1,x"], "no list of batch sizes"),
        (["run", "--vocab", "64", "--hidden", "64", "--gpus", "0"], "'0' is no number from 1 to 64"),
        (["run", "--vocab", "64", "--hidden", "64", "--out", "/dev/null"], "not a folder"),
        (
            ["plan", "--vocab", "64", "--hidden", "64", "--out", "/dev/null"],
            "--out is /dev/null, which is not a folder",
        ),
        (["verify", "/nonexistent.json"], "No such file"),
        (["report", "/dev/null"], "not a plain file"),
        (["show"], "the following arguments are required: file (see `sgl-flashsample tune show --help`)"),
        (["show", "x", "--kind", "sort"], "argument --kind: invalid choice: 'sort'"),
        (["explain", "x"], "required: --batch"),
        (["explain", "x", "--batch", "0"], "argument --batch: '0' is no number from 1"),
        (["explain", "x", "--batch", "9" * 5000], "is no number from 1"),
        (["diff", "x"], "required: b"),
        (["merge", "x", "y"], "required: -o/--out"),
        (["lint"], "required: FILE"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_line_and_exit_code_two(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_run_without_a_gpu_says_so_in_one_line_and_what_needs_none(command, tmp_path):
    code, _, err = command("run", "--vocab", 640, "--hidden", 64, "--out", tmp_path / "out", "--compilers", 1)
    assert code == 2 and "no CUDA device" in err and "other commands need none" in err
    assert err.count("\n") == 1 and not (tmp_path / "out").exists()
    (tmp_path / "table").write_text(TABLE.dumps())
    assert command("verify", tmp_path / "table") == (2, "", err)


def test_help_names_every_command_and_where_servers_look_and_each_command_explains_its_options(command):
    code, out, _ = command("--help")
    assert code == 0 and "FLASHSAMPLE_TUNED_DIR" in out and "examples:" in out and "exit codes: 0 done" in out
    assert all(f"\n    {name} " in out for name in cli.COMMANDS)
    words = {"show": "--json", "explain": "--vocab", "diff": "same head", "merge": "--strict", "run": "--allow-path"}
    for name in cli.COMMANDS:
        code, out, _ = command(name, "--help")
        assert code == 0 and words.get(name, "-h, --help") in out


@pytest.mark.parametrize(
    "missing, arguments, expected",
    [
        ("rich", ["show", "FILE"], "missing"),
        ("plotly", ["report", "FILE"], "missing"),
        ("optuna", ["report", "FILE"], "missing"),
        ("optuna", ["run", *SHAPE], "missing"),
        ("optuna,plotly,scipy", ["show", "FILE"], 0),
        ("optuna,plotly,scipy", ["plan", *SHAPE], 0),
        ("optuna,plotly", ["verify", "FILE"], 1),
    ],
)
def test_without_the_extra_what_needs_none_of_it_works_and_the_rest_is_one_line(
    tmp_path, simulated, monkeypatch, capsys, missing, arguments, expected
):
    file = tmp_path / TABLE.file_name
    file.write_text(make_table(device=H200, head=HEAD).dumps())
    loaded = {name for name in sys.modules if name.startswith("sgl_flashsample.autotune.")}
    for name in loaded - {"sgl_flashsample.autotune.pool"}:  # it holds the simulated device
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(autotune, name.rpartition(".")[2], raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] in missing.split(",")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(missing.split(",")), *sys.meta_path])
    with measuring_on(simulated()):
        code = main(["tune", *(str(file) if word == "FILE" else str(word) for word in arguments)])
    if expected == "missing":
        advice = "pip install '.[tune]' in a checkout of sgl-flashsample"
        assert (code, capsys.readouterr().err) == (1, f"error: {missing} is not installed: {advice}\n")
    else:
        assert code == expected


def test_the_efforts_that_can_be_asked_for_are_those_that_are_planned():
    assert tuple(EFFORTS) == cli.EFFORT_NAMES


def test_a_broken_pipe_is_no_error(tmp_path):
    file = tmp_path / TABLE.file_name
    file.write_text(TABLE.dumps())
    run = [sys.executable, "-m", "sgl_flashsample", "tune", "show", str(file)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(run, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
