"""benchmarks/compile_kit.py: it finds the kernels of the kit, and fills the cache for a card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import needs_triton

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "compile_kit.py"


@needs_triton
@pytest.mark.kernels
def test_the_cache_is_filled_without_a_card(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "flash", "--most", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) kernels, 2 compiled", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > 1000, "all of the kit's"
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2
