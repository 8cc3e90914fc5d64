"""The machine that numbers come from: device, versions, clocks, commit, and its own ceilings, measured.

`python -m attnzoo.bench.machine DEVICE` prints it as JSON: in a process of its own, so that the benchmark's parent never
touches the device.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["ceilings", "describe", "look"]

PACKAGES = ("attnzoo", "torch", "triton", "attnzoo-sdpa", "attnzoo-flex", "attnzoo-flash-attn", "flash-attn", "fa3-fwd", "flash-attn-4")
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu", "driver_version")
MATMUL = {"cuda": 8192, "cpu": 1024}
COPIED = {"cuda": 2**31, "cpu": 2**27}  # bytes


def look(device: str) -> dict[str, Any]:
    """`describe` in a process of its own.

    Raises:
        ValueError: the device is unknown, or there is none here.
    """
    command = [sys.executable, "-m", "attnzoo.bench.machine", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"device {device!r} can't be used here: {said[:300]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def describe(device: str) -> dict[str, Any]:
    """Plain numbers and strings: no host name and no path."""
    import torch

    place = torch.device(device)
    measured = ceilings(place)
    return {
        "device": device,
        "name": torch.cuda.get_device_name(place) if place.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": _versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if place.type == "cuda" else None,
        "clocks": _clocks() if place.type == "cuda" else None,  # under the load of the ceilings
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "ceilings": measured,
    }


def ceilings(device: Any) -> dict[str, float]:
    """What this device reaches: TFLOP/s of a square matrix product by dtype, GB/s of a copy, read plus written."""
    import torch

    kind = device.type if device.type in MATMUL else "cpu"
    dtypes = ("bfloat16", "float16", "float32") if kind == "cuda" else ("float32",)
    found = {}
    for name in dtypes:
        n = MATMUL[kind]
        a, b = torch.randn(2, n, n, device=device).to(getattr(torch, name))
        found[name] = 2 * n**3 / _best_seconds(lambda a=a, b=b: a @ b, device) / 1e12  # type: ignore[misc]
    source = torch.zeros(COPIED[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy"] = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device) / 1e9
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _best_seconds(call: Callable[[], object], device: Any, repeats: int = 10) -> float:
    from attnzoo.bench.timing import synchronize

    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _clocks() -> dict[str, str] | None:
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", "-i", index]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(CLOCKS, (part.strip() for part in done.stdout.strip().split(","))))


def _commit() -> str | None:
    """Of the checkout that attnzoo runs from, "+" where files of it or of its plugins were changed; None for an installed one.

    `ATTNZOO_COMMIT` names it where a checkout without its history is run.
    """
    if os.environ.get("ATTNZOO_COMMIT"):
        return os.environ["ATTNZOO_COMMIT"]
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a package inside somebody else's checkout is not it
        parts = [str(part) for part in (folder.parent, folder.parents[1] / "plugins") if part.exists()]
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", *parts) else "")
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
