"""Importing this lets its process import SGLang beside a CPU build of PyTorch.

PyPI's torchvision is a CUDA build: it cannot load its library there, and then lacks two schemas. ``bootstrap.py`` puts
a copy of this file into ``.venv``, and servers of ``cpu_platform.py`` import one as ``sitecustomize``, so it needs
nothing else. The copy that a process imports first does the work.
"""

from __future__ import annotations

import importlib.abc
import sys


class _TorchvisionSchemas(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                sys.modules[__name__].torchvision_library = library
                for op in ("nms", "qnms"):
                    library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


if "torchvision" not in sys.modules and not any(type(one).__name__ == "_TorchvisionSchemas" for one in sys.meta_path):
    sys.meta_path.insert(0, _TorchvisionSchemas())
