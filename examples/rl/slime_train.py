"""Loads SGLang's plugins, then runs slime's ``train.py``: slime adds SGLang's arguments to its own parser, which knows
the backend only after that. Run it where ``train.py`` is, with the same arguments."""

import runpy

from sglang.srt.plugins import load_plugins

if __name__ == "__main__":
    load_plugins()
    runpy.run_path("train.py", run_name="__main__")
