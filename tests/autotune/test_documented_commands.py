"""Every command line that README.md and the pages of docs/ show is run, with a small stand-in for what it names."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from command_line import runner_of
from lab.simulated import measuring_on

from sgl_flashsample import cli
from sgl_flashsample.tables.lookup import user_folder

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHOWN = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )?(?:sgl-flashsample|sglang|pip) [^#\n]*?)\s*(?:#.*)?$", re.M)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`(sgl-flashsample [^`]*)`")
# A command that takes a machine or minutes, and the test that runs it.
RUN_ELSEWHERE = {
    "pip install .": "tests/project/test_package.py::test_an_installation_puts_only_sgl_flashsample_into_site_packages",
    "pip install '.[tune]'": "tests/project/test_package.py::test_metadata_name_license_entry_points",
    "sglang serve --model-path Qwen/Qwen3-8B --sampling-backend flashsample": "tests/sglang/test_server.py",
    "FLASHSAMPLE_TUNED_DIR=/tables sglang serve --model-path /models/Qwen3-8B --sampling-backend flashsample": (
        "tests/core/test_table_lookup.py"
    ),
    "sgl-flashsample bench --model-path MODEL": "tests/tools/test_bench.py::test_two_real_servers_are_compared",
    "sgl-flashsample doctor": "tests/tools/test_doctor.py",
    "sgl-flashsample serve --require --model-path MODEL --enable-metrics": (
        "tests/tools/test_command_line.py::test_a_server_can_be_required_to_fuse"
    ),
    "sgl-flashsample tune COMMAND --help": "tests/autotune/test_tune_commands.py",
    "FLASHSAMPLE_TRACE=hot.json sglang serve --model-path MODEL --sampling-backend flashsample": (
        "tests/sglang/test_server.py::test_a_server_that_is_asked_to_counts_what_it_draws_whoever_draws_it"
    ),
    "sgl-flashsample trace map hot.json --out map.pt": (
        "tests/tools/test_trace_commands.py::test_a_map_has_the_most_frequent_ids_as_sglang_reads_them"
    ),
}


def shown_commands() -> list[str]:
    commands = []
    for page in PAGES:
        text = page.read_text()
        for language, block in BLOCK.findall(text):
            commands += SHOWN.findall(block) if language in ("", "bash") else []
        commands += INLINE.findall(BLOCK.sub("", text))
    return list(dict.fromkeys(commands))


def test_the_pages_show_commands_and_those_run_elsewhere_are():
    commands = shown_commands()
    assert len(commands) >= 10 and set(RUN_ELSEWHERE) <= set(commands)
    for test in RUN_ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / file).read_text(), test


def qwen3_8b(folder: Path) -> Path:
    """A folder with the config of that model, as far as its head goes."""
    model = folder / "Qwen3-8B"
    model.mkdir()
    config = {"vocab_size": 151_936, "hidden_size": 4096, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("shown", [command for command in shown_commands() if command not in RUN_ELSEWHERE])
def test_a_shown_command_runs(shown, tmp_path, capsys, simulated):
    """A model's name stands for a folder with its config, and a tuning run is one of a simulated device."""
    model, tables = qwen3_8b(tmp_path), tmp_path / "tables"
    tables.mkdir()
    stand_in = {"/models/Qwen3-8B": model, "models/Qwen3-8B": model, "MODEL": model, "/tables": tables}
    words = [str(stand_in.get(word, word)) for word in shlex.split(shown)]
    assert words[0] == "sgl-flashsample"
    if words[1:3] == ["tune", "run"]:
        words += ["--effort", "quick", "--batch-sizes", "1", "--compilers", "1"]
        words += [] if "--out" in words else ["--out", str(tables)]
    with measuring_on(simulated()):
        code, out, err = runner_of(cli.main, capsys)(*words[1:])
    assert code == 0, err
    assert out


def test_the_page_of_the_report_shows_the_plan_that_is_printed_on_an_h200_with_16_processors(tmp_path, capsys):
    """A line of three points stands for lines that are left out."""
    page = (ROOT / "docs" / "tune" / "report.md").read_text()
    (shown,) = re.findall(r"^\$ sgl-flashsample tune plan models/Qwen3-8B\n((?:.+\n)+)", page, re.M)
    arguments = ("tune", "plan", qwen3_8b(tmp_path), "--device", "H200", "--processes", 15)
    code, out, err = runner_of(cli.main, capsys)(*arguments)
    assert (code, err) == (0, "")
    printed = out.replace(str(user_folder(os.environ)), "~/.cache/sglang/flashsample")
    first, last = shown.split("...\n")
    assert (printed[: len(first)], printed[-len(last) :]) == (first, last)
