"""``sgl-flashsample doctor``: what of this machine works with us, what does not, and what to do about it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import time
import warnings

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One checked thing. level: ok, note (works, but know this) or problem (``advice`` says what to do)."""

    level: str
    what: str
    advice: str = ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Finding:
    ours = _version("sgl-flashsample") or "not installed, run from a checkout"
    return Finding(OK, f"Python {platform.python_version()}, sgl-flashsample {ours}")


def check_torch_and_triton() -> list[Finding]:
    findings = []
    for package, oldest in (("torch", (2, 11)), ("triton", (3, 6))):
        version = _version(package)
        if version is None:
            findings.append(Finding(PROBLEM, f"{package} is not installed", f"pip install {package}"))
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        wanted = ".".join(map(str, oldest))
        advice = "" if numbers >= oldest else f"upgrade {package} to {wanted} or newer"
        findings.append(Finding(OK if numbers >= oldest else PROBLEM, f"{package} {version}", advice))
    return findings


def check_device() -> Finding:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        return Finding(NOTE, "no CUDA device: kernels run interpreted, which shows that they are right, not fast")
    from .sglang.support import device_problem

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    problem = device_problem(device)
    if problem:
        return Finding(PROBLEM, f"{name}: {problem}", "SGLang's own sampler will serve everything on this device")
    return Finding(OK, name)


def check_sglang() -> list[Finding]:
    from .cli import entry_point_found
    from .sglang import versions

    version = versions.sglang_version()
    if importlib.util.find_spec("sglang") is None:
        return [Finding(NOTE, "SGLang is not installed", "pip install 'sgl-flashsample[sglang]' to serve")]
    findings = []
    problem = versions.version_problem(version)
    if problem:
        findings.append(Finding(PROBLEM, problem, "install a known version; until then SGLang's sampler serves"))
    else:
        findings.append(Finding(OK, f"SGLang {version}"))
    if entry_point_found():
        findings.append(Finding(OK, "plugin entry point found: --sampling-backend flashsample is valid"))
    else:
        advice = "pip install sgl-flashsample into the environment of this Python"
        findings.append(Finding(PROBLEM, "SGLang would not find the plugin", advice))
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "flashsample" not in allowed.split(","):
        findings.append(Finding(PROBLEM, f"SGLANG_PLUGINS={allowed} leaves the plugin out", "add flashsample to it"))
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problems = [p for p in map(versions.target_problem, versions.HOOK_TARGETS) if p]
    except Exception as error:
        import torch

        level = PROBLEM if torch.cuda.is_available() else NOTE
        advice = "find out why `import sglang.srt.layers.logits_processor` fails"
        advice += "" if level == PROBLEM else " (SGLang needs a GPU for that; `sgl-flashsample demo` works around it)"
        return [*findings, Finding(level, f"SGLang does not import here: {error}", advice)]
    advice = "this SGLang is changed; its own sampler would serve"
    findings.extend(Finding(PROBLEM, f"hook target: {problem}", advice) for problem in problems)
    if not problems:
        findings.append(Finding(OK, f"all {len(versions.HOOK_TARGETS)} hook targets are as expected"))
    return findings


def check_kernels() -> Finding:
    """Every tile of this device against the float64 reference, on a random head."""
    import torch

    from .choices import choices_for
    from .demo import interpreter
    from .kernels.head import LMHead
    from .selftest import compare_with_reference

    started = time.monotonic()
    cuda = torch.cuda.is_available()
    if not cuda:
        interpreter.patch()
    generator = torch.Generator().manual_seed(0)
    shape, dtype = ((40_000, 1024), torch.bfloat16) if cuda else ((2000, 64), torch.float32)
    weight = torch.randn(*shape, generator=generator).to(dtype)
    head = LMHead(weight.cuda() if cuda else weight)
    rows = 512 if cuda else 64
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, of the interpreter
            problem = compare_with_reference(head, rows)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem:
        return Finding(
            PROBLEM, f"self-test: {problem}", "report this with the lines above; SGLang's sampler would serve"
        )
    kernels = len({config for _, _, config in choices_for(head).used_up_to(rows)})
    return Finding(
        OK, f"self-test: {kernels} configurations draw the reference's tokens ({time.monotonic() - started:.1f} s)"
    )


def run(as_json: bool = False) -> int:
    """Print the findings; 0 when nothing stands against serving, 1 otherwise."""
    findings = [check_python(), *check_torch_and_triton()]
    if not any(f.level == PROBLEM for f in findings):
        findings.append(check_device())
        findings.extend(check_sglang())
        findings.append(check_kernels())
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.level:8}{finding.what}" + (f"\n        -> {finding.advice}" if finding.advice else ""))
    return 1 if any(finding.level == PROBLEM for finding in findings) else 0
