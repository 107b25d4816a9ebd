"""``python -m sgl_flashsample`` is ``sgl-flashsample``."""

from __future__ import annotations

from .cli import main

raise SystemExit(main())
