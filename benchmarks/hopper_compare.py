"""flash on an H100 or H200 beside its peers, in one process: the tables of docs/hopper.md.

    python benchmarks/hopper_compare.py --json hopper_compare.json [--jobs 12] [--seconds 230] [--only table,window]

Peers: torch SDPA's FlashAttention 2 (fa2) and cuDNN, compiled FlexAttention (flex), the PyPI packages fa3-fwd (fa3, forward
only) and flash-attn-4 (fa4); one that can't be imported or can't run a cell is recorded with its reason. All are called as a
user calls them, ours through `attnzoo.get("flash")`.

First every cell is run once in processes of their own (--jobs), which fills the compile caches; then the cells are timed one
after the other, as `card_clock.py` does it: the median of five rounds that alternate between the contenders, because the card's
power limit moves the clock by 10% from one round to the next, without the host's share of a call. TFLOP/s count useful work: 4 D a
visible pair forward, 10 D backward. An output is compared with float64 before its time counts. `hopper_tables.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from block_sparse_peers import compiled_flex
from card_clock import ROUNDS, interleaved_ms
from hopper_gpu import relative, spot_check, visible_pairs
from provenance import machine
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnzoo
from attnzoo.masks import band_mask
from attnzoo.spec import AttentionSpec

PACKAGES = ("torch", "triton", "attnzoo", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13")
Run = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """One problem of a section; window is how many keys to the left are seen, itself apart."""

    section: str
    head_dim: int
    length: int
    causal: bool
    batch: int
    q_heads: int
    kv_heads: int
    window: int | None = None
    backward: bool = False
    flex: bool = False

    @property
    def name(self) -> str:
        kind = f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"
        return f"{self.section} d{self.head_dim} {self.q_heads}/{self.kv_heads} {kind} s{self.length}"

    def tensor(self, heads: int) -> Tensor:
        return torch.randn(self.batch, self.length, heads, self.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def inputs(self) -> list[Tensor]:
        return [self.tensor(heads).requires_grad_(self.backward) for heads in (self.q_heads, self.kv_heads, self.kv_heads)]

    def spec(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionSpec:
        return AttentionSpec.of(q, k, v, causal=self.causal, window=None if self.window is None else (self.window, 0))


def cells() -> Iterator[Cell]:
    """B S = 16384 and H D = 2048 where nothing else is said."""
    for d in (128, 64):
        for causal in (False, True):
            for s in (512, 2048, 8192, 16384):
                heads = 2048 // d
                yield Cell("table", d, s, causal, 16384 // s, heads, heads, backward=True, flex=s == 8192)
    for d in (96, 192, 256):
        for causal in (False, True):
            for s in (512, 2048, 8192, 16384):
                heads = 2048 // d
                yield Cell("dims", d, s, causal, 16384 // s, heads, heads, backward=s == 8192)
    for causal in (False, True):
        for s in (2048, 8192, 32768):
            yield Cell("grouped", 128, s, causal, 2, 64, 8, backward=s <= 8192)
    for window in (128, 1024):
        for d in (128, 64):
            for s in (8192, 16384, 65536):
                heads = 2048 // d
                batch = max(1, 16384 // s)
                yield Cell("window", d, s, False, batch, heads, heads, window=window, backward=s <= 16384, flex=s != 16384)


# The contenders: each takes (B, H, S, D) and gives the same


def ours(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = None if cell.window is None else (cell.window, 0)
    return attnzoo.get("flash")(q, k, v, causal=cell.causal, window=window)


def sdpa(backend: SDPBackend, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if cell.window is not None:
        raise NotImplementedError("takes no window")
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=cell.q_heads != cell.kv_heads)


def fa2(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if cell.window is None:
        return sdpa(SDPBackend.FLASH_ATTENTION, cell, q, k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = cell.length
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, s, s, 0.0, False, False, window_size_left=cell.window, window_size_right=0
    )
    return out[0].transpose(1, 2)


@cache
def flex_mask(length: int, window: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j <= window)

    return torch.compile(create_block_mask)(sees, None, None, length, length, device="cuda")


def flex(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not cell.flex:
        raise NotImplementedError("compiling it for every shape takes too long here")
    mask = None
    if cell.causal or cell.window is not None:
        mask = flex_mask(cell.length, cell.length if cell.window is None else cell.window)
    out: Tensor = compiled_flex()(q, k, v, block_mask=mask)
    return out


def fa3(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fa3_fwd_interface import flash_attn_func

    if cell.window is not None:
        raise NotImplementedError("the wheel is built without windows")
    out = flash_attn_func(*(t.detach().transpose(1, 2) for t in (q, k, v)), causal=cell.causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def fa4(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func

    window = (None, None) if cell.window is None else (cell.window, 0)
    out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=cell.causal, window_size=window)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


CONTENDERS: dict[str, Callable[..., Tensor]] = {
    "ours": ours,
    "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "fa2": fa2,
    "fa3": fa3,
    "fa4": fa4,
    "flex": flex,
}
FORWARD_ONLY = ("fa3",)


# Time


def true_gradients(cell: Cell, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> list[Tensor]:
    """Those of the last key head of the last batch and of its query heads, in float64; one query head at a time, for the memory."""
    spec = cell.spec(q, k, v)
    kept = band_mask(spec, slice(0, spec.q_len), slice(0, spec.kv_len), q.device)
    q64, k64, v64 = (t[-1, -heads:].detach().double() for t, heads in ((q, spec.group), (k, 1), (v, 1)))
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (q64, k64, v64))
    for head in range(spec.group):
        leaves = [t.requires_grad_() for t in (q64[head].clone(), k64[0].clone(), v64[0].clone())]
        s = leaves[0] @ leaves[1].mT * spec.scale
        o = torch.softmax(s if kept is None else s.masked_fill(~kept, float("-inf")), -1) @ leaves[2]
        found = torch.autograd.grad(o, leaves, grad_o[-1, head - spec.group].double())
        grad_q[head], grad_k[0], grad_v[0] = found[0], grad_k[0] + found[1], grad_v[0] + found[2]
    return [grad_q, grad_k, grad_v]


def demand(what: str, error: float, limit: float) -> None:
    if not error <= limit:
        raise ArithmeticError(f"relative error of {what} is {error:.1e}")


def cell_runs(cell: Cell, names: list[str], *, checked: bool = True) -> tuple[dict[str, Run], dict[str, Run], dict[str, str]]:
    """What to time forward and backward, and the reasons of those that are left out."""
    q, k, v = cell.inputs()
    plain = [t.detach() for t in (q, k, v)]
    grad_o = cell.tensor(cell.q_heads)
    spec = cell.spec(*plain)
    truth = true_gradients(cell, q, k, v, grad_o) if checked and cell.backward else []
    forward: dict[str, Run] = {}
    backward: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            out = CONTENDERS[name](cell, *plain)
            if checked:
                demand("o", spot_check(cell, spec, *plain, out), 5e-3)
            forward[name] = partial(CONTENDERS[name], cell, *plain)
            if cell.backward and name not in FORWARD_ONLY:
                out = CONTENDERS[name](cell, q, k, v)
                run = partial(torch.autograd.grad, out, (q, k, v), grad_o, retain_graph=True)
                for what, found, wanted in zip(("dq", "dk", "dv"), run(), truth):
                    demand(what, relative(found[-1, -len(wanted) :], wanted), 1e-2)
                backward[name] = run
        except Exception as problem:
            reasons[name] = f"{type(problem).__name__}: {problem}"[:300]
    return forward, backward, reasons


def row_of(cell: Cell, kind: str, runs: dict[str, Run], reasons: dict[str, str]) -> dict[str, Any]:
    q, k, v = cell.inputs()
    flops = (4 if kind == "forward" else 10) * cell.head_dim * visible_pairs(cell.spec(q, k, v)) * cell.batch * cell.q_heads
    del q, k, v
    times, late = interleaved_ms(runs)
    speed = {name: round(flops / ms / 1e9, 1) for name, ms in times.items()}
    others = {name: x for name, x in speed.items() if name != "ours"}
    best = max(others, key=lambda name: others[name], default=None)
    ratio = round(speed["ours"] / others[best], 3) if best and "ours" in speed else None
    row = {"cell": cell.name, "pass": kind, **asdict(cell), "ms": {n: round(t, 4) for n, t in times.items()}}
    print(
        f"{time.perf_counter() - START:5.0f}s {kind:8} {cell.name:34}",
        *(f"{n} {x:.0f}" for n, x in speed.items()),
        f"| {ratio} of {best}",
        flush=True,
    )
    return row | {"tflops": speed, "best": best, "ours_to_best": ratio, "host_was_late": late, "reasons": reasons}


def time_cell(cell: Cell, names: list[str]) -> list[dict[str, Any]]:
    forward, backward, reasons = cell_runs(cell, names)
    with torch.no_grad():
        rows = [row_of(cell, "forward", forward, reasons)]
    if backward:
        rows.append(row_of(cell, "backward", backward, reasons))
    return rows


# The training step


class Block(torch.nn.Module):
    """A GPT-2 block whose attention is looked up at every call, so that one model serves all contenders."""

    def __init__(self, width: int, heads: int, attend: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.project(self.attend["now"](q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(torch.nn.functional.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


def training_steps(length: int) -> dict[str, Any]:
    """GPT-2 medium, bf16 autocast, no compile, no dropout, 16384 tokens a step: tokens/s by attention."""
    cell = Cell("gpt2", 64, length, True, 16384 // length, 16, 16)
    names = {"ours": ours, "cudnn": CONTENDERS["cudnn"], "fa2": fa2, "efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION)}
    attend: dict[str, Any] = {}
    torch.manual_seed(0)
    with torch.device("cuda"):
        blocks = [Block(1024, 16, attend) for _ in range(24)]
        model = torch.nn.Sequential(torch.nn.Embedding(50304, 1024), *blocks, torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 50304))
        tokens = torch.randint(50257, (cell.batch, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(ROUNDS + 1):  # the first round warms up
        for name, function in names.items():
            attend["now"] = partial(function, cell)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            if i:
                seconds[name].append((time.perf_counter() - start) / 3)
    speed = {name: round(16384 / statistics.median(times)) for name, times in seconds.items()}
    best = max((name for name in speed if name != "ours"), key=lambda name: speed[name])
    ratio = round(speed["ours"] / speed[best], 3)
    print(f"{time.perf_counter() - START:5.0f}s GPT-2 medium, T = {length}: tokens/s", speed, f"| {ratio} of {best}", flush=True)
    return {"cell": f"gpt2 s{length}", "pass": "step", "tokens_per_second": speed, "best": best, "ours_to_best": ratio}


# The whole


def warm(share: list[Cell], names: list[str]) -> None:
    for cell in share:
        cell_runs(cell, names, checked=False)
        torch.cuda.empty_cache()


def warm_in_processes(jobs: int, arguments: argparse.Namespace, seconds: float) -> None:
    """Compile everything once: Triton, Inductor and CuTe keep what they compile on disk."""
    command = [sys.executable, __file__, "--only", arguments.only, "--peers", arguments.peers, "--warm"]
    running = [subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for i in range(jobs)]
    deadline = time.perf_counter() + seconds
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["ours_to_best"]:
            groups.setdefault(f"{row['cell'].split()[0]} {row['pass']}", []).append(row["ours_to_best"])
    return {
        name: {"geometric_mean": round(math.exp(statistics.fmean(map(math.log, found))), 3), "least": min(found), "cells": len(found)}
        for name, found in groups.items()
    }


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path:
        path.write_text(
            json.dumps(
                {**machine(PACKAGES, path), "cudnn": torch.backends.cudnn.version(), "summary": summary(rows), "rows": rows}, indent=1
            )
        )


START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="table,gpt2,grouped,window,dims", help="sections, in the order in which they run")
    parser.add_argument("--peers", default="cudnn,fa2,fa3,fa4,flex")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile first; 0: compile on the way")
    parser.add_argument("--seconds", type=float, default=230.0, help="start no cell later than this")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sections = arguments.only.split(",")
    names = ["ours", *(name for name in arguments.peers.split(",") if name)]
    chosen = [cell for section in sections for cell in cells() if cell.section == section]
    if arguments.warm:
        i, jobs = map(int, arguments.warm.split("/"))
        warm(chosen[i::jobs], names)
        return
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if arguments.jobs:
        warm_in_processes(arguments.jobs, arguments, arguments.seconds * 0.4)
    print(f"{time.perf_counter() - START:5.0f}s compiled", flush=True)
    print("ours:", attnzoo.explain(*Cell("", 128, 512, True, 1, 1, 1, backward=True).inputs(), causal=True), flush=True)
    rows: list[dict[str, Any]] = []
    for section in sections:
        work: list[Callable[[], list[dict[str, Any]]]] = [partial(time_cell, cell, names) for cell in chosen if cell.section == section]
        if section == "gpt2":
            work = [lambda length=length: [training_steps(length)] for length in (1024, 4096)]
        for item in work:
            if time.perf_counter() - START > arguments.seconds:
                break
            try:
                rows += item()
            except Exception as problem:
                print(f"FAILED {item}: {type(problem).__name__}: {problem}"[:400], flush=True)
            torch.cuda.empty_cache()
        write(arguments.json, rows)
    print(json.dumps(summary(rows), indent=1), flush=True)


if __name__ == "__main__":
    main()
