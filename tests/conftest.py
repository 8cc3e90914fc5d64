"""Where there is no GPU, Triton kernels run in Triton's interpreter; that is decided before triton is imported."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
