"""The demonstration: a checkpoint whose distribution is known, a server as a child process, and what ``make`` runs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch
from lab import bootstrap
from serving import CUDA, needs_sglang

from sgl_flashsample.tools import demo, markov, smollm2
from sgl_flashsample.tools.server import RequestError, Server, ServerError, free_port

ROOT = Path(__file__).resolve().parents[2]

# --- the checkpoint


@pytest.mark.parametrize("name", ["tiny", "tiny-llama-tied", "tiny-softcap", "tiny-granite"])
def test_a_written_checkpoint_loads_with_the_same_truth_and_passes_its_embedding_through(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    size = markov.SIZES[name]
    written, loaded = markov.write(tmp_path, size), markov.MarkovModel.load(tmp_path)
    tokens = torch.arange(0, size.vocab_size, 37)
    assert torch.equal(written.logits(tokens), loaded.logits(tokens))
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not size.tied
    to_residual = [tensor for key, tensor in tensors.items() if key.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(to_residual) == 2 * size.num_hidden_layers and not any(tensor.any() for tensor in to_residual)
    hidden = torch.nn.functional.rms_norm(tensors["model.embed_tokens.weight"][tokens], (size.hidden_size,), eps=1e-6)
    head = tensors["model.embed_tokens.weight" if size.tied else "lm_head.weight"]
    logits = hidden.double() @ head.double().T / (size.logits_scaling or 1.0)
    if size.softcap:
        logits = size.softcap * torch.tanh(logits / size.softcap)
    torch.testing.assert_close(loaded.logits(tokens), logits, rtol=0, atol=1e-5)


def test_contexts_are_peaked_zipf_like_and_flat_and_their_tokens_share_a_distribution():
    model = markov.build(markov.SIZES["tiny"])
    members = [(model.context == context).nonzero()[:, 0] for context in range(markov.CONTEXTS)]
    top = model.distribution(torch.stack([tokens[0] for tokens in members])).amax(-1)
    assert (top[0::4] > 0.8).all()
    assert ((top[1::4] > 0.05) & (top[1::4] < 0.6)).all()
    assert (top[3::4] < 0.02).all()
    assert torch.equal(*model.logits(members[5][[0, 3]]))


def test_a_second_write_keeps_the_files_and_another_size_replaces_them(tmp_path):
    pytest.importorskip("safetensors")
    markov.write(tmp_path, markov.SIZES["tiny"])
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    markov.write(tmp_path, markov.SIZES["tiny"])
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    markov.write(tmp_path, dataclasses.replace(markov.SIZES["tiny"], vocab_size=512))
    assert markov.MarkovModel.load(tmp_path).head.shape[0] == 512


def test_every_size_has_a_config_that_names_its_dimensions():
    for name, size in markov.SIZES.items():
        assert markov.config(size)["hidden_size"] == size.hidden_size, name
        assert size.hidden_size % markov.CONTEXTS == 0


# --- the server


def port_of(server: Server, option: str) -> int:
    return int(server.command[server.command.index(option) + 1])


def test_no_port_of_a_server_is_one_that_the_system_hands_out_to_others_meanwhile(tmp_path):
    server = Server(tmp_path, ["--tp", "1"], backend=None, log=tmp_path / "log")
    first_of_others = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [port_of(server, option) for option in ("--port", "--nccl-port")]
    assert ports[0] == server.port != ports[1]
    assert all(1024 <= port < first_of_others for port in ports)
    chosen = Server(tmp_path, ["--nccl-port", "1234"], backend="pytorch", log=tmp_path / "log")
    assert chosen.command.count("--nccl-port") == 1 and port_of(chosen, "--nccl-port") == 1234
    assert chosen.command[-2:] == ["--sampling-backend", "pytorch"]


def test_a_taken_port_is_said_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        server = Server(tmp_path, [], backend=None, log=tmp_path / "log", port=taken.getsockname()[1])
        with pytest.raises(ServerError, match=f"port {server.port} is taken"):
            server.start()


def stand_in(code: str) -> list[str]:
    """A server that runs ``code``, with its port in ``port``."""
    return [sys.executable, "-c", f"import sys; port = int(sys.argv[sys.argv.index('--port') + 1])\n{code}"]


def test_a_server_that_dies_at_start_is_reported_with_its_last_error(tmp_path):
    launcher = stand_in("print('ValueError: no such model'); print('bye'); sys.exit(3)")
    with (
        pytest.raises(ServerError, match="ended with code 3: ValueError: no such model"),
        Server(tmp_path, [], backend=None, log=tmp_path / "log", launcher=launcher),
    ):
        pass


ANSWERS = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b"up 1")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(400 if "bad" in body else 200, json.dumps({"path": self.path, "body": body}).encode())
    def answer(self, code, data):
        self.send_response(code); self.end_headers(); self.wfile.write(data)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_requests_and_their_answers_and_no_process_is_left(tmp_path):
    child = "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    launcher = stand_in(f"{child}\nprint('flashsample', child.pid, flush=True)\n{ANSWERS}")
    with Server(tmp_path, [], backend=None, log=tmp_path / "log", launcher=launcher) as server:
        assert server.generate(text="a") == {"path": "/generate", "body": {"text": "a"}}
        assert server.post("/v1/models", n=1) == {"path": "/v1/models", "body": {"n": 1}}
        assert server.post("/flush_cache") == {"path": "/flush_cache", "body": {}}
        assert server.metrics() == "up 1"
        with pytest.raises(RequestError, match="/generate answered 400: "):
            server.generate(bad=True)
        (line,) = server.log_lines("flashsample")
        assert line in server.log_text()
    status = Path(f"/proc/{line.split()[1]}/stat")  # of the server's child
    for _ in range(50):
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("a child of the server is left")


BREAKS_OFF = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"up 1")
    def do_POST(self):
        if self.path == "/half":
            self.send_response(200); self.send_header("Content-Length", "100"); self.end_headers()
            self.wfile.write(b"a")
        else:
            print("CUDA Error: out of memory", flush=True); os._exit(7)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_that_ends_before_its_answer_does_is_named_with_its_last_error(tmp_path):
    with Server(tmp_path, [], backend=None, log=tmp_path / "log", launcher=stand_in(BREAKS_OFF)) as server:
        with pytest.raises(ServerError, match=r"/half was not answered: IncompleteRead"):
            server.post("/half")
        with pytest.raises(ServerError, match=r"/generate was not answered: "):
            server.generate(text="a")
        server.process.wait(5)
        words = r"/generate was not answered: .*; the server ended with code 7: CUDA Error: out of memory \(log: "
        with pytest.raises(ServerError, match=words):
            list(server.stream(text="a"))


@pytest.mark.slow
@pytest.mark.parametrize("message", ["code: -98, name: EADDRINUSE", "[Errno 98] ... address already in use"])
def test_a_server_that_finds_a_port_taken_is_started_once_more_with_others(tmp_path, message):
    ports = (
        "with open('ports', 'a+') as file: print(*sys.argv, file=file); file.seek(0); starts = len(file.readlines())"
    )
    fails = f"if starts <= int(sys.argv[-1]): sys.exit({message!r})"
    launcher = stand_in(f"import os; os.chdir({str(tmp_path)!r})\n{ports}\n{fails}\n{ANSWERS}")
    with Server(tmp_path, ["--fails", "1"], backend=None, log=tmp_path / "log", launcher=launcher) as server:
        assert server.metrics() == "up 1"
    first, second = (re.findall(r"--(?:nccl-)?port (\d+)", line) for line in (tmp_path / "ports").open())
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    (tmp_path / "ports").unlink()
    with (
        pytest.raises(ServerError, match=re.escape(message)),
        Server(tmp_path, ["--fails", "2"], backend=None, log=tmp_path / "log", launcher=launcher),
    ):
        pass


# --- what is shown


class FakeServer:
    """Answers as a server of a model whose greedy token after 300 is ``truth``."""

    def __init__(self, folder: Path, model: str, *_args, **_options) -> None:
        self.model, self.truth = model, 5
        self.start = self.wait_until_ready = lambda: None

    def log_lines(self, part: str) -> list[str]:
        about = ", ".join(["a part of a long line"] * 12)
        return [f"[1{part}0.1.0: {about}" if part.endswith("sample ") else f"[1{part}since the start: {about}; 3 rows"]

    def generate(self, text=None, input_ids=None, sampling_params=None, **fields):
        answer = {"output_ids": [self.truth], "text": f"{self.model} says a word " * 9, "meta_info": {}}
        answer["meta_info"] |= {"flashsample_path": ["fused"], "output_token_logprobs": [(-1.0, 5, None)]}
        return answer if isinstance(text, str) else [answer] * len(text or input_ids)


class FakeTruth:
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([5]), 8).float()


@pytest.fixture
def fake_servers(monkeypatch):
    monkeypatch.setattr(demo, "make_server", FakeServer)
    monkeypatch.setattr(demo, "stop_all", lambda servers: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(markov, "write", lambda *arguments: FakeTruth())
    monkeypatch.setattr(smollm2, "write", lambda folder: None)
    monkeypatch.setattr(smollm2, "weights_file", lambda: Path("weights"))


def test_the_trained_model_is_shown_first_and_no_line_is_longer_than_100_columns(fake_servers, tmp_path, capsys):
    demo.run(tmp_path, None, "tiny")
    shown = capsys.readouterr().out
    assert 0 < shown.index("smollm2 says") < shown.index("tiny says")
    assert max(map(len, shown.splitlines())) <= 100
    assert " ".join(shown.split()).count("a part of a long line") == 24, "folded, not cut"


def test_without_the_trained_model_the_generated_one_is_shown(fake_servers, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "weights_file", lambda: None)
    demo.run(tmp_path, None, "tiny")
    shown = capsys.readouterr().out
    assert "tiny says" in shown and "smollm2 says" not in shown


def test_a_greedy_token_that_is_not_the_truths_ends_the_demonstration(fake_servers, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeTruth, "logits", lambda self, tokens: torch.zeros(1, 8))
    with pytest.raises(ServerError, match="a greedy token differs"):
        demo.run(tmp_path, None, "tiny")


# --- make


@pytest.mark.parametrize("gpu, cores, workers", [(False, 1, None), (False, 2, 2), (False, 16, 4), (True, 16, None)])
def test_make_test_uses_the_cores_that_there_are_and_does_not_share_a_gpu(monkeypatch, gpu, cores, workers):
    called = []
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(subprocess, "call", lambda command, env, cwd: called.append(command[1:]) or 7)
    assert bootstrap.run_tests(["-k", "some"], {}) == 7
    assert called == [[*(["-n", str(workers)] if workers else []), "-k", "some"]]


def test_without_the_trained_model_everything_else_is_installed(monkeypatch, capsys):
    installed = []

    def pip(what, *arguments):
        if bootstrap.TRAINED_MODEL in arguments:
            raise bootstrap.SetupError("no network")
        installed.append(what)

    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install("demo", gpu=True)
    assert installed == ["SGLang and this package (several GB)"]
    assert "the demo goes without it (no network)" in capsys.readouterr().out


def test_what_is_installed_is_not_installed_again(monkeypatch, tmp_path):
    installed = []

    def pip(what, *arguments):
        installed.append(what)
        for argument in arguments:
            if isinstance(argument, Path) and argument.suffix == ".partial":
                argument.mkdir(parents=True)

    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "run", lambda what, command: (tmp_path / ".venv").mkdir(exist_ok=True))
    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setattr(bootstrap, "write_site_files", lambda gpu: None)
    bootstrap.set_up("test")
    assert len(installed) == 4 and not any("beside it" in what for what in installed)
    installed.clear()
    bootstrap.set_up("test")
    bootstrap.set_up("demo")
    assert not installed, "an environment for tests has all that the demonstration needs"
    bootstrap.set_up("full")
    assert len(installed) == len(bootstrap.OTHER_VERSIONS) and all("beside it" in what for what in installed)


def test_versions_that_are_installed_side_by_side_share_no_folder(monkeypatch, tmp_path):
    together = threading.Barrier(len(bootstrap.OTHER_VERSIONS), timeout=60)

    def pip(_what, *arguments):
        folder = arguments[arguments.index("--target") + 1]
        folder.mkdir(parents=True)
        (folder / "packages").write_text(" ".join(arguments[arguments.index("--target") + 2 :]))
        together.wait()  # a version that ends early would hide what it shares with the others

    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install_other_versions()
    for folder, packages in bootstrap.OTHER_VERSIONS.items():
        assert (tmp_path / folder / "packages").read_text() == " ".join(packages)
        assert not (tmp_path / f"{folder}.partial").exists()


def test_steps_run_side_by_side_and_the_error_of_one_is_raised_when_all_have_ended():
    both, ended = threading.Barrier(2, timeout=60), []

    def fails():
        both.wait()
        raise bootstrap.SetupError("no network")

    def works():
        both.wait()
        ended.append(True)

    with pytest.raises(bootstrap.SetupError, match="no network"):
        bootstrap.together(fails, works)
    assert ended == [True]


IMPORTS = """
import site, sys
sys.path.append(sys.argv[1])  # without its path files
if sys.argv[2:]:
    site.addsitedir(sys.argv[2])
from transformers import AutoModelForCausalLM, LlamaConfig
from sglang.srt.platforms import current_platform
import sglang.srt.layers.logits_processor
print(type(current_platform).__name__)
"""


@pytest.mark.slow
@needs_sglang
@pytest.mark.skipif(torch.version.cuda is not None, reason="torchvision fits PyTorch")
def test_the_environment_imports_transformers_and_sglang_whoever_asks(monkeypatch, tmp_path):
    packages = tmp_path / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    for _ in range(2):  # a second setup finds the files of the first
        bootstrap.write_site_files(gpu=False)
    command = [sys.executable, "-S", "-c", IMPORTS, sysconfig.get_path("purelib")]
    without, done = (
        subprocess.run([*command, *site], capture_output=True, text=True, check=False, cwd=tmp_path)
        for site in ([], [str(packages)])
    )
    assert "torchvision::nms does not exist" in without.stderr, "the environment needs nothing of ours any more"
    assert (done.returncode, done.stdout) == (0, "NativeCpuPlatform\n"), done.stderr


@pytest.mark.server
@pytest.mark.full
@needs_sglang
@pytest.mark.skipif(CUDA, reason="serves as any SGLang does")
def test_the_environment_serves_with_nothing_set(tmp_path):
    """SGLang's own command, with its own variables alone."""
    names = {point.value for point in importlib.metadata.entry_points(group="sglang.srt.platforms")}
    if "lab.cpu_platform:activate" not in names:
        pytest.skip("this environment was not made by `make`")
    markov.write(tmp_path / "model", markov.SIZES["tiny"])
    options = {"backend": "flashsample", "log": tmp_path / "log", "environment": {"TRITON_INTERPRET": "0"}}
    with Server.on_this_machine(tmp_path / "model", ["--dtype", "float32"], **options) as server:
        answer = server.generate(text="a", sampling_params={"max_new_tokens": 4})
        assert len(answer["output_ids"]) == 4
        assert server.log_lines("fused sampling active")


def test_two_targets_at_the_same_time_set_up_one_after_the_other(monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "LOCK", tmp_path / "cache" / "setup.lock")
    said, order = [], []
    monkeypatch.setattr(bootstrap, "say", said.append)

    def second() -> None:
        with bootstrap.alone():
            order.append("second")

    thread = threading.Thread(target=second)
    with bootstrap.alone():
        thread.start()
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert said == ["[setup] waiting for another target that is setting up .venv"]


def test_a_trained_model_that_cannot_be_converted_is_one_line_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"SmolLM2-135M-Instruct could not be converted: no output"):
        smollm2.write(tmp_path / "smollm2")
    assert not any(tmp_path.iterdir())


def test_make_has_every_target_and_a_mistake_is_one_line():
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"\$\(BOOTSTRAP\) ([\w-]+)", makefile) == list(bootstrap.TARGETS)
    command = [sys.executable, bootstrap.__file__, "tset"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: unknown target 'tset'; expected one of {', '.join(bootstrap.TARGETS)}\n"
