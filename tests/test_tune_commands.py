"""``tune plan``, ``run``, ``verify`` and ``report``, as a person meets them."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import pytest
import torch
from sgl_flashsample.autotune import commands, search_commands
from sgl_flashsample.autotune.head import HeadError, head_of, shard_of
from sgl_flashsample.autotune.plan import EFFORTS

from sgl_flashsample.table import HeadShape

SURFACE = {
    "schema": "flashsample-surface/1",
    "device": {"name": "NVIDIA H200", "cc": "9.0", "sms": 132, "l2_mb": 50, "smem_optin": 232448},
    "env": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
    "noise": 0.003,
    "model": {"us": 300.0, "rugged": 0.08},
    "faults": {"plain/fused-16x128x128-w4-s6-c1-r16-one": "wrong"},
}


@pytest.fixture
def surface(tmp_path):
    path = tmp_path / "surface.json"
    path.write_text(json.dumps(SURFACE))
    return str(path)


def tune(*arguments: str) -> int:
    try:
        return commands.main(list(arguments))
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1


def config(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return path


def test_a_plan_says_what_is_tried_how_long_it_takes_and_where_a_server_looks(capsys, tmp_path):
    assert tune("plan", "--vocab", "151936", "--hidden", "4096", "--effort", "quick", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "kernels to compile in" in out and "85 races" in out
    assert f"{tmp_path}/fs1,device=NVIDIA_H200,V=151936,D=4096,tp=1,w=bf16.json" in out
    assert "assumed: there is no GPU here" in out


def test_a_plan_as_json_has_every_study(capsys):
    assert tune("plan", "--vocab", "32000", "--hidden", "2048", "--device", "a100", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"]["cc"] == "8.0"
    assert {s["study"].split("/")[0] for s in plan["studies"]} == {
        *("plain", "truncate", "edit", "edit+truncate"),
        *("plain+screen", "truncate+screen", "edit+screen", "edit+truncate+screen"),
    }
    assert all(0 < s["trials"] <= s["space"] for s in plan["studies"])


def test_a_run_a_verification_and_a_report_over_a_recorded_surface(capsys, tmp_path, surface):
    arguments = ["--vocab", "128256", "--hidden", "4096", "--effort", "quick", "--batch-sizes", "1,64"]
    assert tune("run", *arguments, "--surface", surface, "--out", str(tmp_path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["status"] == "done" and facts["complete"] is True
    assert tune("verify", facts["file"], "--surface", surface) == 0
    assert "none slower than the default" in capsys.readouterr().out
    assert tune("show", facts["file"]) == 0
    capsys.readouterr()
    assert tune("report", facts["file"]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    assert_self_contained(page)
    for part in ("<svg", "NVIDIA H200", "plain/fused-16x128x128-w4-s6-c1-r16-one", "incorrect", "default", "gemm"):
        assert part in page, part
    assert page.count("<polyline") >= 10
    assert tune("run", *arguments, "--surface", surface, "--out", str(tmp_path)) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_full_search_reports_what_decides(capsys, tmp_path, surface):
    arguments = ["--vocab", "128256", "--hidden", "4096", "--batch-sizes", "1", "--rivals", "off"]
    assert tune("run", *arguments, "--surface", surface, "--out", str(tmp_path)) == 0
    (table,) = tmp_path.glob("fs1*.json")
    assert tune("report", str(table), "--out", str(tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text()
    assert "What decides:" in page and "num_warps" in page


def assert_self_contained(page: str) -> None:
    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert tag not in ("script", "link", "img", "iframe"), tag
            assert not {"src", "href", "onload"} & {name for name, _ in attributes}

    Reader().feed(page)
    assert "http://" not in page and "https://" not in page


def test_a_report_shows_names_from_a_table_as_text(tmp_path, surface, capsys):
    arguments = ["--vocab", "128256", "--hidden", "4096", "--effort", "quick", "--batch-sizes", "1"]
    tune("run", *arguments, "--surface", surface, "--out", str(tmp_path))
    (path,) = tmp_path.glob("fs1*.json")
    table = json.loads(path.read_text())
    table["env"]["note"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(table))
    assert tune("report", str(path)) == 0
    assert "<script>" not in path.with_suffix(".html").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run"], "give a model's folder or config.json, or --vocab and --hidden"),
        (["plan", "/nonexistent/model"], "neither a model's folder nor a config.json"),
        (["plan", "--vocab", "0", "--hidden", "64"], "--vocab is 0"),
        (["plan", "--vocab", "64", "--hidden", "3"], "--hidden is 3"),
        (["plan", "--vocab", "64", "--hidden", "64", "--dtype", "int8"], "--dtype is 'int8'"),
        (["plan", "--vocab", "64", "--hidden", "64", "--tp", "0"], "--tp is 0"),
        (["plan", "--vocab", "64", "--hidden", "64", "--device", "abacus"], "--device is 'abacus'"),
        (["run", "--vocab", "64", "--hidden", "64", "--budget", "soon"], "'soon' is no time"),
        (["run", "--vocab", "64", "--hidden", "64", "--batch-sizes", "1,x"], "no list of batch sizes"),
        (["run", "--vocab", "64", "--hidden", "64", "--gpus", "0"], "'0' is no number from 1 to 64"),
        (["run", "--vocab", "64", "--hidden", "64", "--surface", "/nonexistent"], "no surface in /nonexistent"),
        (["run", "--vocab", "64", "--hidden", "64", "--out", "/dev/null"], "not a folder"),
        (["verify", "/nonexistent.json"], "No such file"),
        (["report", "/dev/null"], "not a plain file"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_two(arguments, message, capsys):
    assert tune(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_a_gpu_a_run_is_one_line_that_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert tune("run", "--vocab", "640", "--hidden", "64", "--out", str(tmp_path), "--compilers", "1") == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: the device ")


def test_a_head_is_read_from_a_models_config(tmp_path):
    path = config(tmp_path, vocab_size=151936, hidden_size=4096, torch_dtype="bfloat16")
    expected = HeadShape(151936, 4096, "bf16")
    assert head_of(str(tmp_path), None, None, None, None, 1) == expected
    assert head_of(str(path), None, None, None, None, 1) == expected
    assert head_of(str(path), 1000, None, "fp16", None, 1) == HeadShape(1000, 4096, "fp16")


def test_a_head_within_a_model_that_also_sees_and_its_softcap(tmp_path):
    text = {"vocab_size": 262144, "hidden_size": 3840, "final_logit_softcapping": 30.0}
    path = config(tmp_path, text_config=text, dtype="bfloat16", hidden_size=1)
    assert head_of(str(path), None, None, None, None, 1) == HeadShape(262144, 3840, "bf16", 1, True)
    assert not head_of(str(path), None, None, None, False, 1).softcap


def test_a_shard_is_cut_as_servers_cut_it(tmp_path):
    assert (shard_of(151936, 1), shard_of(151936, 2), shard_of(50257, 4)) == (151936, 75968, 12576)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": "many"}', '{"vocab_size": 5}'])
def test_a_config_that_is_none_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HeadError) as error:
        head_of(str(tmp_path), None, None, None, None, 1)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_run_without_a_gpu_says_so_in_one_line_and_what_needs_none(capsys, tmp_path):
    assert tune("run", "--vocab", "1000", "--hidden", "64", "--effort", "quick", "--out", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "no CUDA device" in said and "other commands need none" in said
    assert "\n" not in said.strip()


def test_the_efforts_that_can_be_asked_for_are_those_that_are_planned():
    assert tuple(EFFORTS) == search_commands.EFFORT_NAMES
