"""Why a configuration is rejected: an exception of a compiler, of a device or of a check as one reason and one line."""

from __future__ import annotations

import re
from typing import Any

# Lasting reasons are properties of the configuration. The others may have a cause outside: a later run tries again.
LASTING = ("shared_memory", "registers", "compile", "incorrect")
REASONS = (*LASTING, "timeout", "runtime")
MAX_DETAIL = 200  # characters

# Errors after which a process cannot go on: its context of the device is lost.
_LOST = re.compile(r"illegal|misaligned|unspecified launch failure|CUDA error|hardware stack|device-side assert", re.I)
_COMPILE = ("CompilationError", "CompileTimeAssertionFailure", "PTXASError", "PassManager", "UnsupportedLanguage")


class IncorrectTokens(Exception):
    """Tokens or logits that are not the reference's."""


def error_of(error: BaseException) -> dict[str, Any]:
    """{"error": {"reason", "detail", "fatal"}}: the meaning of an exception for the configuration that was at work."""
    kind, text = type(error).__name__, str(error)
    detail = text if isinstance(error, IncorrectTokens) else f"{kind}: {(text.splitlines() or [''])[0]}"
    detail = "".join(letter if letter.isprintable() else " " for letter in detail[:MAX_DETAIL])
    fatal = bool(_LOST.search(text)) and kind != "OutOfResources" and not isinstance(error, IncorrectTokens)
    if isinstance(error, IncorrectTokens):
        reason = "incorrect"
    elif kind == "OutOfResources" or "out of resource" in text:
        reason = "shared_memory" if "shared" in text else "registers"
    elif not fatal and (kind in _COMPILE or "ptxas" in text.lower() or "PassManager" in text):
        reason = "compile"
    else:
        reason = "runtime"
    return {"error": {"reason": reason, "detail": detail, "fatal": fatal}}
