"""Files that servers and tuners share: always whole, and never outside their folder.

    python benchmarks/robustness.py --out benchmarks/results/robustness.json

saves   ``--writers`` processes save a tuned table into one file, 1,000 times each, while another one reads it: each
        read must give one of their tables
kills   a process that saves a table again and again is killed (SIGKILL) at a random moment: the file must be a table
names   names of devices made of anything that a name may have, among them paths: where the table of such a device is
        looked for must be one file of the folder

In each section something is planted: files that are written in place, and a name that is taken as it is. It must be
noticed. The exit code is 1 if something is wrong, or if that is not noticed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import make_parser, new_env, write_result
from tqdm import tqdm

from sgl_flashsample.files import write_whole
from sgl_flashsample.tables import schema
from sgl_flashsample.tables.schema import HeadShape, Table, TableError, file_name

SHIPPED = sorted(Path(schema.__file__).parent.glob(f"{schema.FILE_PREFIX}*.json"))
HEAD = HeadShape(vocab=128_256, hidden=4096, dtype="bf16")
LONGEST_KILL = 0.01  # seconds that a writer has
PLANTED = 20  # tries at least that must notice what is planted
PARTS = (
    "..",
    "/",
    "\\",
    "\0",
    "\n",
    "~",
    "C:",
    " ",
    "é",
    "\u202e",
    "NVIDIA",
    "H200",
    "%2e",
    "a" * 80,
    ".json",
    "-",
    "=",
)
Write = Callable[[Path, str], Any]


def in_place(file: Path, text: str) -> None:
    """What no file of ours is written by, slowly."""
    with file.open("w") as opened:
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            opened.write(half)
            opened.flush()
            time.sleep(LONGEST_KILL)


def is_table(file: Path) -> bool:
    try:
        Table.loads(file.read_text())
    except (OSError, TableError):
        return False
    return True


def save_often(write: Write, file: Path, texts: list[str], saves: int) -> None:
    for number in range(saves):
        write(file, texts[number % len(texts)])


def count_saves(options: Any, write: Write, saves: int) -> tuple[int, int]:
    """Saves, and reads that gave no table."""
    texts, wrong = [table.read_text() for table in SHIPPED], 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        write_whole(file, texts[0])
        context = multiprocessing.get_context("fork")
        about = (write, file, texts, saves)
        writers = [context.Process(target=save_often, args=about) for _ in range(options.writers)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            wrong += not is_table(file)
        wrong += any(writer.exitcode for writer in writers)
        wrong += len(os.listdir(folder)) != 1  # a temporary file that stays behind
    return saves * options.writers, wrong


def count_kills(options: Any, write: Write, kills: int) -> tuple[int, int]:
    """Kills, and files that are no table after one."""
    texts, wrong, chance = [table.read_text() for table in SHIPPED], 0, random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        write_whole(file, texts[0])
        for _ in tqdm(range(kills), desc="kills", unit="kill"):
            child = os.fork()
            if child == 0:
                save_often(write, file, texts, sys.maxsize)
            time.sleep(chance.uniform(0, LONGEST_KILL))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            wrong += not is_table(file)
    return kills, wrong


def count_names(options: Any, name_of: Callable[[str, HeadShape], str], names: int) -> tuple[int, int]:
    """Names, and those that are no file of the folder."""
    wrong, chance, folder = 0, random.Random(0), Path("/folder")
    for _ in range(names):
        file = name_of("".join(chance.choices(PARTS, k=chance.randint(1, 6))), HEAD)
        inside = os.path.normpath(folder / file) == str(folder / file) and Path(file).name == file
        wrong += not (inside and file.isprintable() and not file.startswith("."))
    return names, wrong


def as_it_is(device: str, head: HeadShape) -> str:
    return f"{device}-{head.vocab}.json"


SECTIONS: dict[str, tuple[Callable[..., tuple[int, int]], Any, Any]] = {
    "saves": (count_saves, write_whole, in_place),
    "kills": (count_kills, write_whole, in_place),
    "names": (count_names, file_name, as_it_is),
}


def main() -> int:
    parser = make_parser(__doc__, needs_gpu=False)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=1000, help="of each writer")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--names", type=int, default=100_000)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for section, (count, ours, planted) in SECTIONS.items():
        tries, wrong = count(options, ours, getattr(options, section))
        noticed = count(options, planted, max(PLANTED, getattr(options, section) // 10))[1]
        rows.append({"section": section, "tries": tries, "wrong": wrong, "planted_noticed": noticed})
        print(rows[-1], flush=True)
        write_result(options.out, {"env": new_env(), "rows": rows})
    return int(any(row["wrong"] or not row["planted_noticed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
