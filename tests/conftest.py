"""Where there is no GPU, Triton kernels run in Triton's interpreter; that is decided before triton is imported."""

from __future__ import annotations

import importlib.util
import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import interpreter

    interpreter.install()
