"""Commands, links and variables on the pages exist. (Their numbers: ``test_benchmarks.py``.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"{folder}/README.md" for folder in ("kernels", "autotune", "benchmarks"))]
COMMAND = re.compile(r"(?:^|`)make ([a-z-]+)", re.M)
SET_BY_THE_PLUGIN = {"FLASHSAMPLE_REQUESTED"}  # for its own child processes


def test_the_commands_of_the_readme_are_targets_and_ci_runs_them():
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    named = set(COMMAND.findall((ROOT / "README.md").read_text()))
    assert named == {"demo", "test"}
    for target in named:
        assert f"\n{target}:" in makefile and f"make {target}\n" in ci
    for target in COMMAND.findall((ROOT / "CONTRIBUTING.md").read_text()):
        assert f"\n{target}:" in makefile


def test_the_readme_names_every_environment_variable_that_the_code_reads():
    sources = [path.read_text() for path in (ROOT / "sgl_flashsample").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"\bFLASHSAMPLE_[A-Z_]+\b", source)} - SET_BY_THE_PLUGIN
    named = set(re.findall(r"\bFLASHSAMPLE_[A-Z_]+\b", (ROOT / "README.md").read_text()))
    assert named == read


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_readme_is_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
