"""The image, the compose file, the manifests and the workflow name only what exists. None of them is run here: that
needs a container engine, a cluster or GitHub. (The wheel of what the image copies: ``test_package.py``.)"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl_flashsample import cli, switches
from sgl_flashsample.sglang import versions
from sgl_flashsample.tables import schema

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", "")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in text.splitlines() if line]


def copied() -> list[str]:
    """What the image takes from the checkout."""
    return [name for kind, words in instructions() if kind == "COPY" for name in words.split()[:-1]]


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((MANIFESTS / name).read_text())


def container() -> dict[str, Any]:
    (one,) = manifest("deployment.yaml")["spec"]["template"]["spec"]["containers"]
    return one


def config_map(name: str) -> dict[str, str]:
    """Keys and texts of a ConfigMap that kustomize generates."""
    (one,) = [one for one in manifest("kustomization.yaml")["configMapGenerator"] if one["name"] == name]
    literals = dict(literal.split("=", 1) for literal in one.get("literals", []))
    return literals | {file: (MANIFESTS / file).read_text() for file in one.get("files", [])}


def test_the_image_is_of_the_newest_known_sglang():
    arguments = dict(words.split("=", 1) for kind, words in instructions() if kind == "ARG")
    assert arguments["SGLANG_VERSION"] == ".".join(map(str, versions.NEWEST))
    assert ("FROM", "lmsysorg/sglang:v${SGLANG_VERSION}") in instructions()


def test_what_the_image_copies_is_there_and_reaches_the_build():
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*" and {line[1:] for line in ignored if line.startswith("!")} == set(copied())
    assert all((ROOT / name).exists() for name in copied())


def test_the_commands_of_the_image_exist(capsys):
    lines = [words for kind, words in instructions() if kind == "RUN"]
    commands = [re.findall(r"sgl-flashsample (\S+)", line) for line in lines]
    assert commands == [["--version"], ["warm"]]
    (entry,) = [json.loads(words) for kind, words in instructions() if kind == "ENTRYPOINT"]
    assert entry[:2] == ["sgl-flashsample", "serve"]
    for command in ("--version", "warm --help"):
        with pytest.raises(SystemExit, match="0"):
            cli.main(command.split())
    assert "--device NAME" in capsys.readouterr().out


def test_the_compose_file_builds_this_image_for_one_gpu():
    (service,) = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"].values()
    context = ROOT / "docker" / service["build"]["context"]
    assert (context / service["build"]["dockerfile"]).samefile(DOCKERFILE)
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert service["environment"]["FLASHSAMPLE_TUNED_DIR"] in {one.split(":")[-2] for one in service["volumes"][2:]}


def test_the_environment_of_a_deployment_is_one_that_servers_read():
    (service,) = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"].values()
    for environment in (service["environment"], config_map("flashsample")):
        ours = {name: value for name, value in environment.items() if name.startswith("FLASHSAMPLE_")}
        assert ours
        for name, value in ours.items():
            switches.VARIABLES[name].parse(value)


def test_the_tuned_table_is_a_config_map_where_the_server_looks_for_it():
    ((key, text),) = config_map("flashsample-table").items()
    assert re.fullmatch(r"[-._a-zA-Z0-9]+", key) and len(text) < 2**20
    assert schema.Table.loads(text).kinds
    pod = manifest("deployment.yaml")["spec"]["template"]["spec"]
    (volume,) = [one["name"] for one in pod["volumes"] if one.get("configMap") == {"name": "flashsample-table"}]
    (folder,) = [one["mountPath"] for one in container()["volumeMounts"] if one["name"] == volume]
    assert config_map("flashsample")["FLASHSAMPLE_TUNED"] == f"{folder}/{key}"


def test_names_in_the_manifests_are_those_of_one_another():
    pod, one = manifest("deployment.yaml")["spec"]["template"], container()
    assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}
    claims = [volume["persistentVolumeClaim"] for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"claimName": manifest("cache.yaml")["metadata"]["name"]}]
    assert [source["configMapRef"]["name"] for source in one["envFrom"]] == ["flashsample"]
    assert one["image"] == manifest("kustomization.yaml")["images"][0]["name"]
    (port,) = one["ports"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    assert manifest("service.yaml")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert manifest("pod-monitor.yaml")["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]
    (entry,) = [json.loads(words) for kind, words in instructions() if kind == "ENTRYPOINT"]
    assert entry[entry.index("--port") + 1] == str(port["containerPort"])


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_probes_ask_what_sglang_answers():
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    server = (package / "srt" / "entrypoints" / "http_server.py").read_text()
    routes = set(re.findall(r'^@app\.get\("([^"]+)"\)', server, re.M))
    probes = [container()[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["path"] for probe in probes} <= routes
    assert {probe["port"] for probe in probes} == {port["name"] for port in container()["ports"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_joins_the_manifests():
    done = subprocess.run(["kubectl", "kustomize", MANIFESTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert made.keys() == {"ConfigMap", "Deployment", "PersistentVolumeClaim", "Service"}
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Service"]["spec"]["selector"] == made["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest("pod-monitor.yaml")["spec"]["selector"]["matchLabels"] == labels


def test_the_workflow_runs_the_whole_check_with_the_oldest_and_the_newest_python():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert os.access(ROOT / shlex.split(command)[0], os.X_OK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minors = [int(one) for one in re.findall(r"Python :: 3\.(\d+)", " ".join(project["classifiers"]))]
    assert minors == list(range(min(minors), max(minors) + 1))
    assert job["strategy"]["matrix"]["python"] == [f"3.{min(minors)}", f"3.{max(minors)}"]
    assert project["requires-python"] == f">=3.{min(minors)}"
