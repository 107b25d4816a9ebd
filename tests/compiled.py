"""Where tests keep what Triton compiles for GPUs that are not here, for each other and for the next run."""

from __future__ import annotations

from pathlib import Path

# SGLang names another folder when it is imported: half of the workers would not find what was compiled before.
CACHE = {"TRITON_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".cache" / "triton")}
