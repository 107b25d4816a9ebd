"""``sgl-flashsample doctor``: what works with this package on this machine, what does not, and what to do about it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import first_line
from .waiting import waiting

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One checked thing. level: ok, note (works, but know this) or problem (``advice`` says what to do)."""

    level: str
    what: str
    advice: str = ""


def check_packages() -> Iterator[Finding]:
    """Python, and what this package requires: installed, in the tested range, importable. Sorted by name: NumPy comes
    before the packages that import it, and torch before Triton."""
    try:
        package = importlib.metadata.distribution("sgl-flashsample")
        version, requirements = package.version, package.requires or []
    except importlib.metadata.PackageNotFoundError:
        version, requirements = "not installed, run from a checkout", ["torch", "triton", "msgspec", "numpy"]
    yield Finding(OK, f"Python {platform.python_version()}, sgl-flashsample {version}")
    if importlib.util.find_spec("packaging") is None:
        yield Finding(PROBLEM, "packaging is not installed", "pip install packaging")
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, sorted(requirements)):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield check_package(requirement)


def check_package(requirement: Requirement) -> Finding:
    name, advice = requirement.name, f"pip install '{requirement.name}{requirement.specifier}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(PROBLEM, f"{name} is not installed", advice)
    broken = [one for one in requirement.specifier if not one.contains(version, prereleases=True)]
    newer = [str(one) for one in broken if one.operator in ("<", "<=")]
    if others := [str(one) for one in broken if str(one) not in newer]:
        return Finding(PROBLEM, f"{name} {version} is not {', '.join(others)}", advice)
    try:
        importlib.import_module(name)
    except Exception as error:
        return Finding(PROBLEM, f"{name} {version} does not import: {first_line(error)}", f"install {name} again")
    if newer:
        return Finding(
            NOTE,
            f"{name} {version} is newer than what was tested",
            f"tested with {', '.join(newer)}; if something fails: {advice}",
        )
    return Finding(OK, f"{name} {version}")


def check_device() -> Iterator[Finding]:
    import torch

    from ..defaults import family_of_device

    if not torch.cuda.is_available():
        yield Finding(NOTE, "no CUDA device: rows are drawn in host memory, by the cpu path")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    try:
        family_of_device(device)
    except ValueError as error:
        yield Finding(PROBLEM, f"{name}: {error}", "SGLang's own sampler will serve everything on this device")
    else:
        yield Finding(OK, name)


def check_sglang() -> Iterator[Finding]:
    from ..sglang import versions

    if importlib.util.find_spec("sglang") is None:
        yield Finding(
            NOTE, "SGLang is not installed", "to serve: pip install '.[sglang]' in a checkout of sgl-flashsample"
        )
        return
    version = versions.sglang_version()
    if reason := versions.unsupported_version(version):
        yield Finding(PROBLEM, reason, "install a known version; until then SGLang's sampler serves")
    else:
        yield Finding(OK, f"SGLang {version}")
    if versions.entry_point_found():
        yield Finding(OK, "plugin entry point found: --sampling-backend flashsample is valid")
    else:
        advice = f"install a checkout or wheel of it: {sys.executable} -m pip install PATH"
        yield Finding(PROBLEM, "SGLang would not find the plugin", advice)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "flashsample" not in map(str.strip, allowed.split(",")):
        yield Finding(PROBLEM, f"SGLANG_PLUGINS={allowed} leaves the plugin out", "add flashsample to it")
    try:
        reasons = [reason for reason in map(versions.unsupported_target, versions.HOOK_TARGETS) if reason]
    except Exception as error:
        import torch

        cuda = torch.cuda.is_available()
        advice = "find out why `import sglang.srt.layers.logits_processor` fails"
        advice += "" if cuda else " (SGLang needs a GPU for that; `make demo` in a checkout does without)"
        yield Finding(PROBLEM if cuda else NOTE, f"SGLang does not import here: {first_line(error)}", advice)
        return
    for reason in reasons:
        yield Finding(PROBLEM, f"hook target: {reason}", "this SGLang is changed; its own sampler would serve")
    if not reasons:
        yield Finding(OK, f"all {len(versions.HOOK_TARGETS)} hook targets are as expected")


def check_loops() -> Iterator[Finding]:
    """The loops of the cpu path: whether Numba is here, and can keep what it compiles."""
    from ..cpu_path import unsupported_by_machine

    if reason := unsupported_by_machine():
        yield Finding(NOTE, reason)
        return
    from ..loops_cache import cache_folder

    folder = cache_folder()
    if folder is None:
        advice = "NUMBA_CACHE_DIR names another one; until then each start takes some seconds more"
        yield Finding(NOTE, "the cpu path is compiled at each start: Numba can write to none of its folders", advice)
    else:
        yield Finding(OK, f"the cpu path is compiled once, into {folder}")


def check_variables() -> Iterator[Finding]:
    """Environment variables of this package that servers here would not read as they were meant."""
    from .. import switches
    from ..tables import lookup

    wrong = list(switches.problems(os.environ))
    for _ in lookup.folders(os.environ, wrong):
        pass
    if named := switches.text(switches.FILE_VARIABLE):
        table, reason = lookup.load_table(Path(named))
        wrong += [f"{switches.FILE_VARIABLE}: {named} is not used: {reason}"] if table is None else []
    for line in wrong:
        yield Finding(NOTE, line, "docs/operate/variables.md has the names and values")


def check_tables() -> Iterator[Finding]:
    """The tuned tables that servers here would find for this device, and files that are none."""
    import torch

    from ..kinds import KIND_NAMES
    from ..tables import lookup
    from ..tables.schema import HeadShape

    cuda = torch.cuda.is_available()
    device = lookup.device_of(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    environment = lookup.environment()
    heads: dict[HeadShape, None] = {}
    for folder, _ in lookup.folders(os.environ):
        for path, table, reason in lookup.tables_in(folder):
            if table is None:
                yield Finding(
                    NOTE, f"{path} is not used: {reason}", "remove it, or run `sgl-flashsample tune run` again"
                )
                continue
            assert table.head is not None
            heads.setdefault(table.head)
    shown = []
    for head in heads:
        table_file, _ = lookup.find(lookup.Target(device, head, environment))
        if table_file is not None:
            screened = ", with a screen" * any(KIND_NAMES[kind].screen for kind in table_file.table.kinds)
            about = f"{table_file.match}, {table_file.source}{screened}"
            shown.append(f"{head.vocab} x {head.hidden} {head.dtype} ({about})")
    if shown:
        yield Finding(OK, f"tuned tables for this device: {'; '.join(shown)}")
    elif cuda:
        advice = "sgl-flashsample tune run MODEL; until then the built-in choices serve, and a screen where a server "
        advice += "measures at its start that it is faster"
        yield Finding(NOTE, f"no tuned table for {device.name}", advice)


def check_kernels() -> Iterator[Finding]:
    """Every configuration that batches take on this device against the float64 reference, on a random head. Without a
    CUDA device: the cpu path, if Numba is installed."""
    import torch

    from ..cpu_path import draws_in_host_memory, unsupported_by_machine
    from ..dispatch import default_table
    from ..kernels.params import LMHead
    from ..selfcheck import refuse_wrong

    started, cuda = time.monotonic(), torch.cuda.is_available()
    in_host_memory = draws_in_host_memory(torch.device("cuda" if cuda else "cpu"))
    if in_host_memory and unsupported_by_machine():
        return  # check_loops says so
    # More ids than a small top-k needs to be drawn as from a large vocabulary.
    shape, dtype, rows = ((40_000, 1024), torch.bfloat16, 512) if cuda else ((2600, 64), torch.float32, 32)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    head = LMHead(weight.cuda() if cuda else weight)
    table = default_table(head)
    if reason := refuse_wrong(head, rows, table).fault:
        advice = "report this with the lines above; SGLang's sampler would serve"
        yield Finding(PROBLEM, f"self-test: {reason}", advice)
        return
    configs = {config for _, _, config in table.configs_up_to(rows)}
    checked = "the cpu path draws" if in_host_memory else f"{len(configs)} configurations draw"
    yield Finding(OK, f"self-test: {checked} the reference's tokens ({time.monotonic() - started:.1f} s)")


def findings() -> Iterator[Finding]:
    """Run each check; an exception in one of them becomes a finding. All but the first need the packages that the first
    one looks for."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_packages,
        check_device,
        check_sglang,
        check_loops,
        check_variables,
        check_tables,
        check_kernels,
    ]
    for check in checks:
        made: list[Finding] = []
        try:
            # Libraries print at import, which must not mix with the findings.
            with (
                waiting(f"{check.__name__.replace('_', 'ing ', 1)} takes a while".__str__),
                contextlib.redirect_stderr(io.StringIO()),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                made.extend(check())
        except Exception as error:
            advice = "report this with the lines above; SGLang's sampler would serve"
            made.append(Finding(PROBLEM, f"{check.__name__} failed: {first_line(error)}", advice))
        yield from made
        if check is check_packages and any(finding.level == PROBLEM for finding in made):
            return


def run(as_json: bool = False) -> bool:
    """Print the findings, as they are made or as JSON. Returns whether one of them is a problem."""
    shown = []
    for finding in findings():
        shown.append(finding)
        if not as_json:
            advice = f"\n        -> {finding.advice}" if finding.advice else ""
            print(f"{finding.level:8}{finding.what}{advice}", flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in shown], indent=1))
    return any(finding.level == PROBLEM for finding in shown)
