"""Sets up ``.venv`` and runs ``demo``, ``test`` or ``lint`` in it. Standard library only; ``make`` calls it.

    python3 sgl_flashsample/demo/bootstrap.py demo [arguments of `sgl-flashsample demo`]
    python3 sgl_flashsample/demo/bootstrap.py test [arguments of pytest]

With an NVIDIA GPU it installs SGLang as anybody would; without one, the parts of it that a CPU server imports.
What is done already is not done again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv"
LOG = ROOT / ".cache" / "setup.log"
HERE = Path(__file__).resolve().parent
MOST_TEST_WORKERS = 4  # each may hold gigabytes
OTHER_SGLANG_VERSIONS = ("0.5.17", "0.5.23")  # the tests run these too, beside the installed one
NETWORK_ERRORS = (
    "Temporary failure in name resolution",
    "Failed to establish a new connection",
    "Network is unreachable",
    "Max retries exceeded",
    "Could not fetch URL",
    "ConnectionResetError",
    "Read timed out",
    "from versions: none",
)


class SetupError(Exception):
    """Carries the one line that the person sees."""


def say(message):
    print(message, flush=True)


def has_gpu():
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    done = subprocess.run([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0 and b"GPU" in done.stdout


def run(what, command):
    """Run a step of the setup; its output goes to the log, its progress to the terminal."""
    say("[setup] " + what)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with LOG.open("ab") as log:
        log.write(("\n$ " + " ".join(str(part) for part in command) + "\n").encode())
        log.flush()
        offset = log.tell()
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=subprocess.STDOUT, cwd=str(ROOT))
        shown = 0
        while process.poll() is None:
            time.sleep(0.2)
            waited = int(time.monotonic() - started)
            if waited >= shown + 15:
                shown = waited
                say("        ... {} s".format(waited))
    if process.returncode:
        text = LOG.read_bytes()[offset:].decode(errors="replace")
        where = LOG.relative_to(ROOT)
        if any(error in text for error in NETWORK_ERRORS):
            raise SetupError("no network: pip could not reach its package index (details in {})".format(where))
        lines = [line for line in text.splitlines() if "ERROR" in line or "error:" in line]
        raise SetupError(
            "{} failed: {} (details in {})".format(what, (lines or ["no message"])[-1].strip()[:200], where)
        )


def pip(what, *arguments):
    run(what, [VENV / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", *arguments])


def setup_steps(gpu, target):
    """The steps of an environment: (what, arguments of pip install)."""
    if gpu:
        steps = [("SGLang and this package (several GB)", ["-e", str(ROOT) + "[sglang,flashinfer]"])]
    else:
        steps = [
            ("PyTorch, Triton and what SGLang imports", ["-r", str(HERE / "requirements-cpu.txt")]),
            ("SGLang itself", ["--no-deps", "-r", str(HERE / "requirements-cpu-nodeps.txt")]),
            ("this package", ["-e", str(ROOT)]),
        ]
    if target != "demo":
        steps.append(("the test tools", ["-e", str(ROOT) + "[test]"]))
    return steps


def fingerprint(gpu, target):
    """Changes when what an environment should hold changes."""
    parts = [repr(setup_steps(gpu, target)), repr(OTHER_SGLANG_VERSIONS), sys.version]
    parts += [(ROOT / "pyproject.toml").read_text()]
    parts += [(HERE / name).read_text() for name in ("requirements-cpu.txt", "requirements-cpu-nodeps.txt")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def unpack_other_versions():
    for version in OTHER_SGLANG_VERSIONS:
        folder = VENV / "sglang-versions" / version
        if folder.is_dir():
            continue
        wheels = VENV / "sglang-versions" / "wheels"
        command = ["-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "-d", wheels]
        run(
            "SGLang " + version + ", beside the installed one",
            [VENV / "bin" / "python", *command, "sglang==" + version],
        )
        partial = folder.with_suffix(".partial")
        shutil.rmtree(str(partial), ignore_errors=True)
        with zipfile.ZipFile(str(next(wheels.glob("sglang-" + version + "-*.whl")))) as archive:
            archive.extractall(str(partial))
        partial.rename(folder)


def set_up(target):
    gpu = has_gpu()
    stamp = VENV / ".flashsample-{}".format(target)
    wanted = fingerprint(gpu, target)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if not (VENV / "bin" / "python").exists():
        run("a virtual environment in .venv", [sys.executable, "-m", "venv", str(VENV)])
    for what, arguments in setup_steps(gpu, target):
        pip(what, *arguments)
    if target == "test" and not gpu:
        unpack_other_versions()
    stamp.write_text(wanted)


def run_tests(arguments):
    """pytest, on the cores that there are. Triton's interpreter uses one per process; a GPU is not shared."""
    cores = len(os.sched_getaffinity(0))
    workers = 1 if has_gpu() else min(MOST_TEST_WORKERS, cores)
    command, environment = [str(VENV / "bin" / "pytest")], dict(os.environ)
    if workers > 1:
        # tests/conftest.py says which tests stay together, and in which order: what takes longest starts first.
        command += ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"]
        environment.setdefault("OMP_NUM_THREADS", str(cores // workers))
    return subprocess.call(command + arguments, env=environment, cwd=str(ROOT))


def check_types():
    """mypy on an installed copy: the mapping of kernels/ and autotune/ exists only in an installation."""
    copy = ROOT / ".cache" / "types"
    shutil.rmtree(str(copy), ignore_errors=True)
    pip(
        "a copy of this package to check types on",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(copy),
        str(ROOT),
    )
    for leftover in (ROOT / "build", ROOT / "sgl_flashsample.egg-info"):
        shutil.rmtree(str(leftover), ignore_errors=True)
    environment = dict(os.environ, MYPYPATH=str(copy))
    command = [str(VENV / "bin" / "mypy"), "--config-file", str(ROOT / "pyproject.toml"), "-p", "sgl_flashsample"]
    return subprocess.call(command, env=environment, cwd=str(copy))


def main(arguments):
    target, rest = (arguments or ["demo"])[0], arguments[1:]
    if target not in ("demo", "test", "lint"):
        raise SetupError("unknown target {!r}; expected demo, test or lint".format(target))
    if sys.version_info < (3, 11):
        version = "{}.{}".format(*sys.version_info[:2])
        raise SetupError("Python 3.11 or newer is needed, this is {}; try `make PYTHON=python3.12`".format(version))
    started = time.monotonic()
    set_up(target)
    if time.monotonic() - started > 1:
        say("[setup] done in {:.0f} s".format(time.monotonic() - started))
    binaries = VENV / "bin"
    if target == "demo":
        return subprocess.call([str(binaries / "sgl-flashsample"), "demo", *rest], cwd=str(ROOT))
    if target == "test":
        return run_tests(rest)
    for command in (["check", "."], ["format", "--check", "."]):
        if subprocess.call([str(binaries / "ruff"), *command], cwd=str(ROOT)):
            return 1
    return check_types()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        print("error: {}".format(error), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
