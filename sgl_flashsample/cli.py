"""The command line: ``sgl-flashsample serve | bench | tune | warm | trace | doctor | demo | completion``.

Each failure is one line on the error stream; ``exit_codes.py`` has the codes. Parsing needs the standard library alone,
except for ``tune``, so that ``--help`` works wherever this is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__
from .exit_codes import FAILED, INTERRUPTED, OK, USAGE
from .files import check_output, check_writable

if TYPE_CHECKING:
    from .hot_vocab import HotVocab

# Package that a command may miss -> the extra of this package that brings it.
_EXTRAS = {
    **dict.fromkeys(("sglang", "safetensors", "tokenizers", "transformers"), "[sglang]"),
    **dict.fromkeys(("optuna", "plotly", "rich", "scipy", "pynvml"), "[tune]"),
    "shtab": "[completion]",
    "tqdm": "[sglang]",
    **dict.fromkeys(("torch", "triton", "numpy", "msgspec"), ""),
}
_MAX_ROWS, _MAX_TOKENS = 1 << 16, 1 << 20  # of a batch; of a prompt or an answer: more is a slip of the hand

_EPILOG = """\
exit codes: 0 done; 1 something was found wrong, or does not work: a package that is missing, a server that does not
start, a problem that doctor found, a stale table; 2 an argument, or what it names, cannot be used; 130 interrupted
"""
_SERVE_HELP = """\
Starts SGLang's server with --sampling-backend flashsample. Arguments that are not listed here go to SGLang unchanged;
`python -m sglang.launch_server --help` lists them.
"""
_TRACE_MAP_HELP = """\
Writes the ids that were counted most often, for EAGLE and NEXTN draft models: with --speculative-token-map, SGLang
keeps the rows of these ids alone in the draft model's LM head. Answers do not depend on it. Where traffic has many
other tokens, fewer drafts are accepted.
"""
_SERVE_ENVIRONMENT = """\
environment (1 may also be spelt true, yes or on, and 0 false, no or off):
  FLASHSAMPLE_TUNED        the tuned table to use, as --tuned
  FLASHSAMPLE_TUNED_DIR    folders to look for one in, before the cache and the shipped ones
  FLASHSAMPLE_ALLOW_FAMILY 1: also use a table of another GPU of the same compute capability
  FLASHSAMPLE_SCREEN       auto, on or off, as --flashsample-screen
  FLASHSAMPLE_REQUIRE      1: as --require
  FLASHSAMPLE_STEP_GRAPHS  0: launch each kernel of a step, instead of replaying a CUDA graph
  FLASHSAMPLE_MODEL_GRAPHS 0: leave the CUDA graphs of SGLang's model as they are; 1: let their kernels overlap; unset:
                           with several tensor-parallel ranks, as in SGLang itself
  FLASHSAMPLE_LOG_SECONDS  seconds between the log lines with counters (default 60)
  FLASHSAMPLE_REPORT_PATH  1: every response's meta_info.flashsample_path names the path of each token
  FLASHSAMPLE_SEVERAL_GPUS 0: leave servers of several GPUs to SGLang; 1: serve all of them; unset: two or four
                           tensor-parallel ranks that reach each other's memory, two pipeline stages, and two ranks of
                           DP attention with an LM head each
  FLASHSAMPLE_SPECULATION  0: leave speculative decoding to SGLang; 1: also verify drafts on any tensor-parallel ranks
                           and of several draft heads; unset: with one draft head or NGRAM on one GPU, EAGLE's chains on
                           two
  FLASHSAMPLE_DRAFTS       then, coupled (default): drafts with the noise of the target's tokens; greedy: the likeliest
                           tokens; stock: SGLang's own drafts
  FLASHSAMPLE_DRAFT_VOCAB  all (default); auto: draft the most frequent tokens alone, as long as they cover what
                           requests get; or a file of FLASHSAMPLE_TRACE: its most frequent tokens
  FLASHSAMPLE_ANY_SGLANG   1: also try SGLang versions that this release does not know
  FLASHSAMPLE_TRACE        a file: count the drawn tokens into it (sgl-flashsample trace --help)
"""

_BENCH_HELP = """\
Starts SGLang's server twice with the same arguments, once with its own sampler and once with this backend, and sends
both the same kind of requests, in pairs of measurements, until each cell is decided or the time is over. Arguments that
are not listed here go to both servers unchanged. Where two servers do not fit on the GPU they run in turns: a pair is
then two starts, and a decision takes four pairs or more. --traffic needs two at once.

answers: "faster by 5.1 ± 0.9 %" where the interval of the change excludes 0; "equal within 1.4 %" where it lies within
2 %; "not decided yet (about 3 more minutes)". The interval is a confidence sequence (a t statistic against a normal
mixture of effects): with 99 % it holds the true change after every pair at once, so stopping when decided is sound.

samplings: t1 (temperature 1), trunc (temperature 0.7, top_p 0.9, top_k 50), greedy, penalty, json, logprob,
top-logprobs, ids (logprobs of 16 given ids), prompt-logprobs, processor (a custom logit processor: SGLang's own sampler
serves it in both); with --traffic also mix: 40 % trunc, 20 % t1, 20 % greedy, 10 % penalties or bias, 10 % JSON or
logprobs

A batch of the same requests from start to end is measured: the time per output token. With --traffic, clients send
requests with prompts of 32 to 512 tokens and answers of 16 to 512, each its next one when the last is answered: tokens
per second.
"""
_WARM_HELP = """\
Compiles the kernels that a server launches for a model's LM head into Triton's cache (TRITON_CACHE_DIR, else
~/.triton/cache). No GPU is needed: name the one of the servers. Use the servers' versions of Triton and of this
package, and their tuned table.
"""
_COMPLETION_HELP = """\
Prints a script that completes commands, options and files.

bash: sgl-flashsample completion bash > ~/.local/share/bash-completion/completions/sgl-flashsample
zsh:  sgl-flashsample completion zsh > DIR/_sgl-flashsample, with DIR in $fpath
"""
_TRACE_HELP = """\
Token counts say how often each id is drawn. Count what your model draws: traffic differs, and counts of other text
cover less of it.

a running server: start it with FLASHSAMPLE_TRACE=hot.json in its environment; `show hot.json` at any time.
answers that were kept: `ids answers.jsonl --model /models/Qwen3-8B -o hot.json`
text, where there are none: `text corpus.txt --tokenizer /models/Qwen3-8B -o hot.json`
drafts of the most frequent ids: `map hot.json -o map.pt`, then a server with --speculative-token-map map.pt
"""


class Parser(argparse.ArgumentParser):
    """One line for a usage error; the lines of a description stay as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {message} (see `{self.prog} --help`)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns its exit code; also raises SystemExit, as argparse does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for name in ("stdout", "stderr"):  # None where whoever started this process has closed them
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a letter that a terminal lacks ends no command
    code = OK
    try:
        with _interruptible():
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except ModuleNotFoundError as error:
        package = error.name
        if package is None or "." in package or package == __package__:
            raise  # a module of an installed package
        brings = f"'.{_EXTRAS[package]}' in a checkout of sgl-flashsample" if package in _EXTRAS else f"'{package}'"
        return _fail(f"{package} is not installed: pip install {brings}", FAILED)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error), USAGE)
    except ValueError as error:
        return _fail(str(error), USAGE)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """``kill``, a time limit and a closed terminal end a command as Ctrl-C does, and so the servers that it started."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    # ``nohup`` ignores the second one, and that stays. Only the main thread may set a handler.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    parser = _parser(tune=arguments[:1] == ["tune"])
    options, rest = parser.parse_known_args(arguments)
    if options.command in ("bench", "serve"):  # the rest are arguments of SGLang's server
        return (bench if options.command == "bench" else serve)(options, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options.run(options) or OK


def doctor(options: argparse.Namespace) -> int:
    """Check this machine."""
    from .tools.doctor import run

    return FAILED if run(as_json=options.json) else OK


def demo(options: argparse.Namespace) -> int:
    """Serve a generated checkpoint."""
    from .tools.demo import run
    from .tools.server import ServerError

    try:
        run(Path(options.folder).resolve(), options.port, options.size)
    except ServerError as error:
        return _fail(str(error), FAILED)
    return OK


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _parser(tune: bool = False) -> Parser:
    """The parser of all commands. tune: with the commands of ``tune``, which needs more than the standard library."""
    parser = Parser(prog="sgl-flashsample", description="Exact fused sampling for SGLang.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"sgl-flashsample {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str, **options: Any) -> Parser:
        added = commands.add_parser(name, help=about, **options)
        added.set_defaults(run=run)
        return added

    _add_serve(
        commands.add_parser(
            "serve",
            help="start SGLang's server with the backend on",
            usage="sgl-flashsample serve [option ...] --model-path MODEL [any SGLang server argument ...]",
            description=_SERVE_HELP,
            epilog=_SERVE_ENVIRONMENT,
            allow_abbrev=False,
        )
    )
    _add_bench(
        commands.add_parser(
            "bench",
            help="measure a model's server, stock and with the backend on",
            usage="sgl-flashsample bench --model-path MODEL [option ...] [any SGLang server argument ...]",
            description=_BENCH_HELP,
            allow_abbrev=False,
        )
    )
    tables = commands.add_parser("tune", help="tuned tables: which configuration is fastest on this GPU")
    if tune:
        from .autotune.cli import add_commands

        add_commands(tables)
    about = "compile a head's kernels into the cache, for images; needs no GPU"
    added = command("warm", warm, about, description=_WARM_HELP)
    added.add_argument("model", metavar="MODEL", help="a model's folder, its config.json or a hub's name")
    about = "dtype of the head's weight (default: the config's), such as e4m3 with a scale per row"
    added.add_argument("--dtype", help=about)
    added.add_argument("--device", metavar="NAME", help="the GPU of the servers, such as H100 (default: the one here)")
    added.add_argument("--tuned", metavar="FILE", help="the servers' tuned table (default: the one they would find)")
    added.add_argument("--no-screen", action="store_true", help="for servers without a screen: fewer kernels")
    about = "rows of the largest batch (default: as servers compile)"
    added.add_argument("--max-rows", type=int, metavar="N", help=about)
    added.add_argument("--json", action="store_true", help="print what was compiled as JSON")
    about = "token counts: which ids carry most of a model's traffic"
    _add_trace(command("trace", trace, about, epilog=_TRACE_HELP))
    added = command("doctor", doctor, "check this machine: versions, GPU, hooks, a self-test of the kernels")
    added.add_argument("--json", action="store_true", help="print the findings as JSON")
    about = "print a script that completes commands in a shell"
    added = command("completion", completion, about, description=_COMPLETION_HELP)
    added.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    added = command("demo", demo, "serve a generated checkpoint, send requests, show the path of each")
    added.add_argument("--port", type=_port, help="port of the server (default: a free one)")
    added.add_argument("--size", help="size of the checkpoint (default: small on a GPU, tiny without)")
    added.add_argument("--folder", default=".cache/demo", help="checkpoint and log (default: %(default)s)")
    return parser


def _port(text: str) -> int:
    """The port in an option ``--port``."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 1 to 65535")
    return int(text)


def _table_file(text: str) -> str:
    """The file in an option ``--tuned``."""
    if not text:
        raise argparse.ArgumentTypeError("no file is named; expected the path of a table")
    return text


def _add_serve(parser: argparse.ArgumentParser) -> None:
    about = "the tuned table to use; without it, one that fits this GPU and model is looked for"
    parser.add_argument("--tuned", type=_table_file, metavar="FILE", help=about)
    about = (
        "whether to keep an INT8 copy of the LM head, which small batches read instead of the head; auto: where a "
        "tuned table, or without a fresh one a race at the start, finds it faster"
    )
    parser.add_argument("--flashsample-screen", choices=("auto", "on", "off"), help=about)
    about = "do not start where SGLang's own sampler would serve everything; say why"
    parser.add_argument("--require", action="store_true", help=about)
    parser.add_argument("--port", type=_port, help="port of the server (default: SGLang's own, 30000)")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, metavar="MODEL", help="a model's folder or a hub's name")
    for name, default, metavar, about in (
        ("samplings", "t1,trunc,greedy", "NAMES", "samplings, separated by commas"),
        ("batches", "1,8,32", "SIZES", "numbers of requests at once, separated by commas"),
        ("minutes", 10.0, "N", "time in all, with the starts of the servers"),
        ("input-tokens", 32, "N", "tokens of a prompt"),
        ("output-tokens", 200, "N", "tokens of an answer"),
        ("logs", ".cache/bench", "FOLDER", "folder for the logs of the servers"),
    ):
        about += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar=metavar, help=about)
    parser.add_argument("--in-turns", action="store_true", help="do not run both servers at once, even if they fit")
    about = "then also run SGLang's bench_serving against both, at this many requests per second"
    parser.add_argument("--load", type=float, metavar="RATE", help=about)
    about = (
        "instead, tokens per second of so many clients (16,64,256 by default), whose requests end and join all the time"
    )
    parser.add_argument("--traffic", nargs="?", const="16,64,256", metavar="CLIENTS", help=about)
    about = "sampling backend of stock SGLang (default: its own choice)"
    parser.add_argument("--sampling-backend", metavar="NAME", help=about)
    parser.add_argument("--json", metavar="FILE", help="write the results, with all samples")
    parser.add_argument("--html", metavar="FILE", help="write the results as a page (extra: tune)")


def bench(options: argparse.Namespace, arguments: list[str]) -> int:
    """Compare a server with stock SGLang's. Measurements are kept on an interruption. arguments: SGLang's."""
    names = [name for name in map(str.strip, options.samplings.split(",")) if name]
    if not names:
        raise ValueError(f"--samplings is {options.samplings!r}; expected names separated by commas")
    traffic = options.traffic is not None
    where, sizes = ("--traffic", options.traffic) if traffic else ("--batches", options.batches)
    try:
        batches = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ValueError(f"{where} is {sizes!r}; expected integers separated by commas, such as 1,8,32") from None
    for option, numbers, least, most in (
        (where, batches, 1, _MAX_ROWS),
        ("--input-tokens", [options.input_tokens], 1, _MAX_TOKENS),
        ("--output-tokens", [options.output_tokens], 16, _MAX_TOKENS),
    ):
        if bad := [number for number in numbers if not least <= number <= most]:
            raise ValueError(f"{option} is {bad[0]}; expected {least} to {most}")
    if not 1 <= options.minutes < math.inf:
        raise ValueError(f"--minutes is {options.minutes:g}; expected 1 or more")
    for option, given in (("--load", options.load), ("--in-turns", options.in_turns or None)):
        if traffic and given is not None:
            raise ValueError(f"{option} is no option of a measurement with --traffic; leave it out")
    if options.load is not None and not options.load > 0:
        raise ValueError(f"--load is {options.load:g}; expected requests per second, above 0")
    for option in ("--host", "--port", "--nccl-port"):
        if any(argument.split("=")[0] == option for argument in arguments):
            raise ValueError(f"bench chooses {option} of its two servers itself; leave it out")
    for option in ("--api-key", "--admin-api-key"):
        if any(argument.split("=")[0] == option for argument in arguments):
            raise ValueError(f"bench asks its two servers without a key; leave {option} out")
    for option, file, kind in (
        ("--json", options.json, "a benchmark result"),
        ("--html", options.html, "an HTML page"),
    ):
        if file is not None:
            check_output(file, option, kind)  # now, not after the measurement
    if options.json and options.html and Path(options.json).resolve() == Path(options.html).resolve():
        raise ValueError(f"--json and --html are both {options.json}; expected two files")
    if Path(options.logs).exists() and not Path(options.logs).is_dir():
        raise ValueError(f"--logs is {options.logs}, which is not a folder")
    for package in ("sglang", *["plotly"] * (options.html is not None), *["scipy"] * traffic):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    from .model_config import head_of
    from .tools import bench as benchmark
    from .tools import traffic as moving
    from .tools.samplings import OFFERED
    from .tools.server import ServerError

    if options.sampling_backend == benchmark.OURS:
        raise ValueError("--sampling-backend is of the stock server; expected one of SGLang's own, or leave it out")
    served = (*OFFERED, *([moving.MIX] * traffic))
    if unknown := sorted(set(names) - set(served)):
        known = ", ".join(served)
        raise ValueError(f"--samplings has {', '.join(unknown)}; expected some of {known}")
    vocab = head_of(options.model_path).vocab
    # The first and the last ids of a vocabulary are often special tokens.
    ids = range(vocab // 10, max(vocab // 10 + 1, 9 * vocab // 10))
    try:
        os.makedirs(options.logs, exist_ok=True)
        tempfile.TemporaryFile(dir=options.logs).close()
    except OSError as error:
        raise ValueError(f"--logs is {options.logs}, which cannot be written: {error.strerror}") from None
    load = benchmark.Load(ids, options.input_tokens, long=options.output_tokens)
    comparison = (moving.TrafficBench if traffic else benchmark.Bench)(
        benchmark.Options(
            model=options.model_path,
            arguments=tuple(arguments),
            samplings=tuple(names),
            batches=tuple(batches),
            minutes=options.minutes,
            load=moving.load_of(ids) if traffic else load,
            logs=Path(options.logs).resolve(),
            backend=options.sampling_backend,
            in_turns=options.in_turns,
            rate=options.load,
        ),
        *(None if file is None else Path(file) for file in (options.json, options.html)),
    )
    try:
        comparison.run()
    except ServerError as error:
        return _fail(f"{error} (logs: {comparison.options.logs})", FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted: what was measured until then is above", INTERRUPTED)
    if comparison.unwritten:
        return _fail("; ".join(f"{file} is not written: {why}" for file, why in comparison.unwritten.items()), FAILED)
    return OK


def warm(options: argparse.Namespace) -> int:
    """Compile a head's kernels for a GPU that need not be here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET is 1: the interpreter compiles nothing; expected it unset")
    if options.max_rows is not None and not 1 <= options.max_rows <= _MAX_ROWS:
        raise ValueError(f"--max-rows is {options.max_rows}; expected 1 to {_MAX_ROWS}")
    if options.tuned is not None:
        _check_table(options.tuned)
    import torch
    import triton

    from .autotune.labels import DEVICES, device_named
    from .autotune.warm import warm as compile_kernels
    from .model_config import head_of
    from .selfcheck import MAX_COMPILED_ROWS
    from .tables.lookup import Target, device_of, environment, find
    from .tools.waiting import waiting

    if options.device is not None:
        device = device_named(options.device)
    elif torch.cuda.is_available():
        device = device_of(torch.device("cuda", torch.cuda.current_device()))
    else:
        raise ValueError(f"there is no GPU here: expected --device, one of {', '.join(DEVICES)}")
    head = head_of(options.model, dtype=options.dtype)
    if options.tuned is not None:
        found, warnings = find(Target(device, head, environment()), options.tuned)
        if found is None or found.file != str(Path(options.tuned)):
            raise ValueError(f"--tuned names a table that these servers would not use: {warnings[0]}")
    try:
        os.makedirs(triton.knobs.cache.dir, exist_ok=True)
        check_writable(Path(triton.knobs.cache.dir) / "kernel", "TRITON_CACHE_DIR")
    except OSError as error:
        raise ValueError(f"{triton.knobs.cache.dir}: {error.strerror}; TRITON_CACHE_DIR names another folder") from None
    kernels: list[None] = []
    with waiting(lambda: f"compiling for {device.name}: {len(kernels)} kernels are there"):
        warmed = compile_kernels(
            head,
            device,
            file=options.tuned,
            screened=not options.no_screen,
            max_rows=options.max_rows or MAX_COMPILED_ROWS,
            step=lambda: kernels.append(None),
        )
    if options.json:
        about = {"device": device.name, "triton": triton.__version__, "cache": triton.knobs.cache.dir}
        print(json.dumps(about | warmed._asdict(), indent=1))
        return OK if kernels else FAILED
    print(*warmed.table, sep="\n")
    if not warmed.compiled + warmed.found:
        return _fail(f"no kernel could be compiled for {device.name} with Triton {triton.__version__}", FAILED)
    if warmed.incomplete:
        print(f"{warmed.incomplete} kernels of the cache were incomplete and have been removed")
    print(
        f"{warmed.compiled} kernels compiled for {device.name} in {warmed.seconds:.0f} s, {warmed.found} were there: "
        f"{triton.knobs.cache.dir}"
    )
    return OK


def _check_table(file: str) -> None:
    """Raises ValueError where ``--tuned`` names no tuned table."""
    from .tables.lookup import load_table

    if not Path(file).is_file():
        raise ValueError(f"--tuned is {file}, which is not a file")
    _, reason = load_table(file)
    if reason is not None:
        raise ValueError(f"--tuned is {file}, which is no tuned table: {reason}")


def completion(options: argparse.Namespace) -> int:
    """Print a completion script for all commands, with those of ``tune``."""
    import shtab

    print(shtab.complete(_parser(tune=True), options.shell))
    return OK


def _add_trace(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="command")
    text = actions.add_parser("text", help="count the tokens of text")
    ids = actions.add_parser("ids", help="count ids in JSON lines, as of answers that were kept")
    show = actions.add_parser("show", help="print what the most frequent ids cover")
    merge = actions.add_parser("merge", help="add up token counts, as of several servers")
    about = "write the most frequent ids, for SGLang's --speculative-token-map"
    mapped = actions.add_parser("map", help=about, description=_TRACE_MAP_HELP)
    for action, number, name, about in (
        (text, "*", "FILE", "UTF-8 text; - or none: stdin"),
        (ids, "*", "FILE", "JSON lines: lists of ids, or answers with output_ids or token_ids; - or none: stdin"),
        (show, 1, "HOT", "a file of token counts"),
        (merge, "+", "HOT", "files of token counts of one vocabulary"),
        (mapped, 1, "HOT", "a file of token counts"),
    ):
        action.add_argument("files", nargs=number, default=["-"], metavar=name, help=about)
        action.add_argument("--json", action="store_true", help="print the summary as JSON")
        if action is not show:
            name = "MAP" if action is mapped else "HOT"
            action.add_argument(
                "-o", "--out", required=action in (merge, mapped), metavar=name, help="the file to write"
            )
    mapped.add_argument("--ids", type=int, metavar="N", help="number of ids (default: 15 %% of the vocabulary)")
    about = "a model's folder, its tokenizer.json, or a name that transformers' AutoTokenizer knows"
    text.add_argument("--tokenizer", required=True, dest="model", metavar="PATH|NAME", help=about)
    one = ids.add_mutually_exclusive_group(required=True)
    one.add_argument("--model", metavar="PATH", help="the model's folder or its config.json, for V")
    one.add_argument("--vocab", type=int, metavar="V", help="ids of the whole LM head")
    about = "ids of the whole LM head (default: of the config.json beside the tokenizer, else all that it knows)"
    text.add_argument("--vocab", type=int, metavar="V", help=about)
    for action in (text, ids):
        action.add_argument("--name", help="of the model, to be written down (default: the tokenizer's or the model's)")


def trace(options: argparse.Namespace) -> int:
    """Count tokens, or read the counts of files; write and print them. An interruption keeps what was counted."""
    from .files import write_whole
    from .hot_vocab import HotVocab

    if options.action != "show" and options.out is not None:  # now, not after an hour
        check_output(options.out, "--out", "a token map" if options.action == "map" else "token counts", options.files)
    if options.action == "map":
        return _write_map(options, HotVocab.load(options.files[0]))
    interrupted = False
    if options.action in ("text", "ids"):
        counts, interrupted = _count(options)
    else:
        counts = _sum(options.files)
    out = options.files[0] if options.action == "show" else options.out
    if out is not None and options.action != "show":
        write_whole(out, counts.dumps())
    if options.json:
        print(json.dumps(counts.summary() | {"file": out, "interrupted": interrupted}, indent=1))
    else:
        written = f"{out}: {counts.digest}" if out is not None else "not written: --out names a file to write"
        print(*counts.lines(), written, sep="\n")
    return _fail("interrupted: what was counted until then is above", INTERRUPTED) if interrupted else OK


def _sum(files: list[str]) -> HotVocab:
    """The token counts of all these files. Raises ValueError."""
    from .hot_vocab import HotVocab

    paths = [os.path.realpath(file) for file in files]
    counts = HotVocab.load(files[0])
    for place, file in enumerate(files[1:], 1):
        if paths[place] in paths[:place]:
            raise ValueError(f"{file} is named twice: its tokens would count twice; name it once")
        more = HotVocab.load(file)
        if more.vocab != counts.vocab:
            raise ValueError(
                f"{files[0]} is of {counts.vocab} ids, {file} of {more.vocab}; expected files of one vocabulary"
            )
        counts = counts.plus(more)
    return counts


def _write_map(options: argparse.Namespace, counts: HotVocab) -> int:
    """A list of ids as SGLang reads it."""
    import io

    import torch

    from .files import write_whole
    from .hot_vocab import MAPPED_SHARE

    number = max(1, int(MAPPED_SHARE * counts.vocab)) if options.ids is None else options.ids
    try:
        ids = counts.most_frequent(number)
    except ValueError as error:
        raise ValueError(f"--ids: {error}") from None
    written = io.BytesIO()
    torch.save(ids.tolist(), written)
    write_whole(options.out, written.getvalue())
    tokens = counts.ids[ids]
    covers, counted = float(tokens.sum() / counts.counted), int((tokens > 0).sum())
    if options.json:
        facts = {"file": options.out, "vocab": counts.vocab, "ids": number, "ids_counted": counted, "covers": covers}
        print(json.dumps(facts))
    else:
        never = f", {number - counted:,} of them never counted" if counted < number else ""
        print(f"{options.out}: {number:,} of {counts.vocab:,} ids{never}; {covers:.2%} of the counted tokens")
        print(f"serve with --speculative-token-map {options.out}")
    return OK


def _count(options: argparse.Namespace) -> tuple[HotVocab, bool]:
    """The counts of ``trace text`` and ``trace ids``, and whether an interruption ended them early."""
    from . import hot_vocab
    from .model_config import HeadError, head_of

    name, vocab, encode, known = options.model or "", options.vocab, None, 1
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    if options.action == "text":
        encode, known = hot_vocab.load_tokenizer(name)
    if vocab is None:
        try:
            vocab = head_of(str(folder) if encode else name).vocab
        except HeadError:
            if encode is None:
                raise
            vocab = known
            print(f"V is {known}, the ids that the tokenizer knows; --vocab if the LM head has more", file=sys.stderr)
    if not known <= vocab <= hot_vocab.MAX_VOCAB:
        reason = ", the ids that the tokenizer knows," if encode else ""
        raise ValueError(f"V is {vocab}; expected {known}{reason} to {hot_vocab.MAX_VOCAB}")
    id_counts, interrupted = hot_vocab.count(options.files, vocab, encode)
    if not id_counts.any():
        reason = "interrupted before any token was counted" if interrupted else "the input has no tokens to count"
        raise ValueError(reason)
    if name and path.exists():  # a folder's name, not where it lies
        name = folder.resolve().name
    origins = ", ".join("stdin" if file == hot_vocab.STDIN else Path(file).name for file in options.files)
    name = name if options.name is None else options.name
    return hot_vocab.HotVocab.of_ids(id_counts, name, f"{options.action}: {origins}"), interrupted


def serve(options: argparse.Namespace, arguments: list[str]) -> int:
    """Replace this process by SGLang's server with our backend on. Returns only where that fails. arguments:
    SGLang's."""
    names = {argument.split("=")[0] for argument in arguments}
    if "--sampling-backend" in names:
        raise ValueError("serve sets --sampling-backend itself; leave it out")
    # SGLang would say so after some ten seconds and hundreds of lines. It takes abbreviations too.
    named = {name for name in names if name.startswith("--model") and "--model-path".startswith(name)}
    if not named and "--config" not in names:
        raise ValueError("no model is named: expected --model-path MODEL (see `sgl-flashsample serve --help`)")
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError(name="sglang")
    from .sglang.versions import entry_point_found

    if not entry_point_found():
        return _fail(
            "SGLang would not find the plugin (no entry point 'flashsample' in sglang.srt.plugins); "
            f"install a checkout or wheel of it: {sys.executable} -m pip install PATH",
            FAILED,
        )
    if options.tuned is not None:
        _check_table(options.tuned)
        os.environ["FLASHSAMPLE_TUNED"] = os.path.abspath(options.tuned)  # the server's processes inherit it
    if options.flashsample_screen is not None:
        os.environ["FLASHSAMPLE_SCREEN"] = options.flashsample_screen
    if options.require:
        os.environ["FLASHSAMPLE_REQUIRE"] = "1"
    if options.port is not None:
        arguments = [*arguments, "--port", str(options.port)]
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--sampling-backend", "flashsample"]
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    raise SystemExit(main())
