"""The Hopper kernels on an H100 or H200: correctness first, then time beside torch's SDPA.

    python benchmarks/hopper_gpu.py check [-j 8]           many shapes against fp64, each case in its own process
    python benchmarks/hopper_gpu.py time [--backward]      the table, only where the check of that row passes
    python benchmarks/hopper_gpu.py repeat --times 5000    the same launches many times: equal bits or it is a race

Inputs are fresh random values inside buffers whose slack is NaN; outputs and scratch start as NaN. TFLOP/s count
useful work: 4 D a visible pair forward, 10 D backward. Times are medians of rounds that alternate between kernels,
because the card's power limit moves the clock by 10% from one round to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from provenance import command, commit
from torch import Tensor

from attnzoo.backends.hopper import support
from attnzoo.masks import band_mask
from attnzoo.spec import AttentionSpec

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """One problem; `order` is the memory order of q, k and v, `slack` the rows of NaN behind each sequence."""

    name: str
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 4
    q_len: int = 512
    kv_len: int = 512
    head_dim: int = 128
    value_dim: int | None = None
    dtype: torch.dtype = BF16
    causal: bool = False
    align: str | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    order: str = "bhsd"
    slack: int = 16
    grad_lse: bool = False
    backward: bool = True

    def tensor(self, heads: int, length: int, dim: int | None = None) -> Tensor:
        rows, dim = length + self.slack, dim or self.head_dim
        shape = (self.batch, rows, heads, dim) if self.order == "bshd" else (self.batch, heads, rows, dim)
        buffer = torch.full(shape, float("nan"), device="cuda", dtype=self.dtype)
        view = (buffer.transpose(1, 2) if self.order == "bshd" else buffer)[:, :, :length]
        return view.copy_(torch.randn(view.shape, device="cuda"))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (self.tensor(self.kv_heads, self.kv_len, dim) for dim in (None, self.value_dim))
        return self.tensor(self.q_heads, self.q_len), k, v

    def spec(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionSpec:
        return AttentionSpec.of(q, k, v, causal=self.causal, align=self.align, window=self.window, scale=self.scale)


def check_cases() -> list[Case]:
    both = []
    for d in (64, 128, 256, 96, 80, 192):
        for name, options in {
            "dense": {},
            "ragged": dict(q_len=333, kv_len=517),
            "tiny": dict(q_len=3, kv_len=5),
            "one key": dict(q_len=130, kv_len=1),
            "causal": dict(causal=True),
            "causal ragged": dict(q_len=421, kv_len=421, causal=True),
            "causal top-left": dict(q_len=300, kv_len=200, causal=True, align="top_left"),
            "causal bottom-right": dict(q_len=200, kv_len=777, causal=True, align="bottom_right"),
            "rows without keys": dict(q_len=700, kv_len=200, causal=True, align="bottom_right"),
            "window": dict(q_len=900, kv_len=900, window=(100, 20)),
            "window causal": dict(q_len=1024, kv_len=1024, window=(128, None), causal=True),
            "window left": dict(q_len=800, kv_len=500, window=(70, None), align="top_left"),
            "window right": dict(q_len=500, kv_len=800, window=(None, 33), align="bottom_right"),
            "diagonal": dict(q_len=300, kv_len=300, window=(0, 0)),
            # long enough for the tiles of long calls
            "long": dict(batch=1, q_heads=2, kv_heads=2, q_len=2200, kv_len=4300),
            "long causal": dict(batch=1, q_heads=4, kv_heads=2, q_len=4500, kv_len=4500, causal=True),
            "long shifted": dict(batch=1, q_heads=2, kv_heads=1, q_len=3000, kv_len=4555, causal=True, align="bottom_right"),
            "middle causal": dict(batch=1, q_heads=4, kv_heads=2, q_len=2048, kv_len=2048, causal=True),
            "3000 causal": dict(batch=1, q_heads=4, kv_heads=2, q_len=3000, kv_len=3000, causal=True),
            "500 keys a row": dict(q_len=1100, kv_len=1100, window=(499, 0)),
            "long window": dict(batch=1, q_heads=2, kv_heads=2, q_len=3000, kv_len=3000, window=(1024, 0)),
        }.items():
            both.append(Case(f"{name} d{d}", head_dim=d, **options))
    for d in (64, 128):
        both += [
            Case(f"bshd d{d}", head_dim=d, order="bshd", q_len=390, kv_len=390, causal=True),
            Case(f"grouped d{d}", head_dim=d, q_heads=8, kv_heads=2, q_len=450, kv_len=450, causal=True, order="bshd"),
            Case(f"one kv head d{d}", head_dim=d, q_heads=6, kv_heads=1, q_len=260, kv_len=390),
            Case(f"grouped window d{d}", head_dim=d, q_heads=6, kv_heads=2, q_len=600, kv_len=600, window=(130, 0)),
            Case(f"lse gradient d{d}", head_dim=d, q_len=300, kv_len=300, causal=True, grad_lse=True),
            Case(f"fp16 d{d}", head_dim=d, dtype=FP16, q_len=700, kv_len=650),
            Case(f"fp16 causal d{d}", head_dim=d, dtype=FP16, q_len=640, kv_len=640, causal=True),
            Case(f"scale d{d}", head_dim=d, scale=0.5, q_len=256, kv_len=256),
            Case(f"many tiles d{d}", head_dim=d, batch=3, q_heads=17, kv_heads=17, q_len=1000, kv_len=1300),
            Case(f"many causal tiles d{d}", head_dim=d, batch=3, q_heads=17, kv_heads=17, q_len=1500, kv_len=1500, causal=True),
        ]
    for d in (64, 96, 128):
        both.append(Case(f"many windows d{d}", head_dim=d, batch=3, q_heads=17, kv_heads=17, q_len=1500, kv_len=1500, window=(128, 0)))
    both += [
        Case("values 192/128", head_dim=192, value_dim=128, q_len=700, kv_len=700, causal=True, backward=False),
        Case("values 192/128 long", batch=1, head_dim=192, value_dim=128, q_len=500, kv_len=4200, backward=False),
        Case("values 192/128 long causal", batch=1, head_dim=192, value_dim=128, q_len=2300, kv_len=2300, causal=True, backward=False),
        Case("values 96/64 long causal", batch=1, head_dim=96, value_dim=64, q_len=1300, kv_len=1300, causal=True, backward=False),
        Case("values 96/64", head_dim=96, value_dim=64, q_len=333, kv_len=517, backward=False),
        Case("values 128/112", head_dim=128, value_dim=112, q_len=333, kv_len=517, window=(100, 20), align="top_left", backward=False),
    ]
    return [replace(c, backward=False) if c.head_dim > support.BACKWARD_HEAD_DIM else c for c in both]


def truth(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """o and lse of the textbook in dtype."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = k.repeat_interleave(spec.group, 1), v.repeat_interleave(spec.group, 1)
    s = q @ k.mT * spec.scale
    kept = band_mask(spec, slice(0, spec.q_len), slice(0, spec.kv_len), q.device)
    if kept is not None:
        s = s.masked_fill(~kept, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return p @ v, lse


def fill_cache_with_nan(nbytes: int = 2**28) -> None:
    """What the allocator hands out next holds NaN."""
    torch.full((nbytes // 4,), float("nan"), device="cuda")


def relative(found: Tensor, wanted: Tensor) -> float:
    """Error over truth, both as norms; a truth near zero (a softmax of one key has no gradient) counts as 1% of random values."""
    if not bool(torch.isfinite(found).all()):
        return float("nan")
    return ((found.double() - wanted).norm() / wanted.norm().clamp_min(0.01 * wanted.numel() ** 0.5)).item()


def run_forward(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionSpec, Tensor, Tensor, Any]:
    from attnzoo.backends.hopper import launch

    spec = case.spec(q, k, v)
    o = torch.full_like(q, float("nan")) if case.value_dim is None else q.new_full((*q.shape[:-1], case.value_dim), float("nan"))
    lse = torch.full(q.shape[:-1], float("nan"), device="cuda")
    run = launch.forward_launch(spec, q, k, v, o, lse)
    run()
    return spec, o, lse, run


def run_backward(case: Case, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor):
    from attnzoo.backends.hopper import launch

    grad_o = case.tensor(case.q_heads, case.q_len)
    grad_lse = torch.randn_like(lse) if case.grad_lse else None
    grads = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    fill_cache_with_nan()
    runs = launch.backward_launches(spec, (q, k, v), o, lse, grad_o, grad_lse, tuple(grads))
    for run in runs:
        run()
    return grad_o, grad_lse, grads, runs


def kernels_of(spec: AttentionSpec, *, backward: bool) -> set[str]:
    """What tells apart the main kernels of a call, but for the dtype: tile, columns and constants."""
    from attnzoo.backends.hopper import launch

    plans = [launch.forward_plan(spec)] + [launch.backward_plan(spec)] * backward
    return {repr((plan.variant[0], *plan.variant[3:], plan.seconds)) for plan in plans}


LIMITS = {BF16: (4e-3, 7e-3), FP16: (5e-4, 1e-3)}  # relative error in norm, forward and backward


def seed_of(case: Case) -> int:
    """The same in every process, as Python's own hash of a string is not."""
    return zlib.crc32(case.name.encode())


def check(case: Case) -> dict[str, Any]:
    """Errors against fp64; `bad` lists what is wrong."""
    torch.manual_seed(seed_of(case))
    q, k, v = case.inputs()
    spec, o, lse, _ = run_forward(case, q, k, v)
    reasons = [r for r in support.reasons_against(spec)]
    q64, k64, v64 = (t.double().requires_grad_() for t in (q, k, v))
    o64, lse64 = truth(spec, q64, k64, v64, torch.float64)
    forward_limit, backward_limit = LIMITS[case.dtype]
    bad, errors = list(reasons), {"o": relative(o, o64.detach())}
    empty = lse64.isinf()
    if not torch.equal(lse.isinf() & (lse < 0), empty):
        bad.append("lse is -inf at other rows than those without keys")
    errors["lse"] = (lse.double() - lse64.detach())[~empty].abs().max().item() if not bool(empty.all()) else 0.0
    if bool((o[empty] != 0).any()):
        bad.append("o is not 0 at rows without keys")
    if case.backward:
        grad_o, grad_lse, grads, _ = run_backward(case, spec, q, k, v, o, lse)
        loss = (o64 * grad_o.double()).sum()
        if grad_lse is not None:
            loss = loss + (torch.where(empty, 0.0, lse64) * grad_lse.double()).sum()
        wanted = torch.autograd.grad(loss, (q64, k64, v64))
        errors |= {name: relative(g, w) for name, g, w in zip(("dq", "dk", "dv"), grads, wanted)}
    for name, error in errors.items():
        limit = {"o": forward_limit, "lse": 1e-3}.get(name, backward_limit)
        if not error <= limit:
            bad.append(f"{name} {error:.2e} > {limit:.0e}")
    return {"case": case.name, "errors": errors, "bad": bad, "kernels": sorted(kernels_of(spec, backward=case.backward))}


def check_in_process(case: Case) -> dict[str, Any]:
    try:
        return check(case)
    except Exception as error:
        return {"case": case.name, "errors": {}, "bad": [f"{type(error).__name__}: {error}", traceback.format_exc()[-1500:]]}


def run_checks(jobs: int, pattern: str) -> list[dict[str, Any]]:
    """A group of cases a process, so that a hang or a fault loses that group alone."""
    cases = [c for c in check_cases() if pattern in c.name]
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(jobs, max_tasks_per_child=None) as pool:
        futures = [(case, pool.submit(check_in_process, case)) for case in cases]
        for case, future in futures:
            try:
                results.append(future.result(timeout=60))
            except Exception as error:
                results.append({"case": case.name, "errors": {}, "bad": [f"{type(error).__name__}: {error}"]})
                for process in list((pool._processes or {}).values()):
                    process.kill()
                pool.shutdown(wait=False, cancel_futures=True)
                break
    left = cases[len(results) :]
    return results + [{"case": case.name, "errors": {}, "bad": ["not run: the process of a case before it died"]} for case in left]


# Time


def time_cases(backward: bool, dims: list[int], lengths: list[int]) -> list[Case]:
    rows = []
    for d in dims:
        for causal in (False, True):
            for s in lengths:
                heads = 2048 // d
                name = f"d{d} {'causal' if causal else 'full'} s{s}"
                sizes = (16384 // s, heads, heads, s, s, d)
                rows.append(Case(name, *sizes, causal=causal, order="bshd", slack=0, backward=backward))
    return rows


def visible_pairs(spec: AttentionSpec) -> int:
    """A head."""
    rows = torch.arange(spec.q_len, dtype=torch.int64)
    left, right = spec.band
    first = torch.zeros_like(rows) if left is None else (rows + spec.diagonal - left).clamp(0, spec.kv_len)
    end = torch.full_like(rows, spec.kv_len) if right is None else (rows + spec.diagonal + right + 1).clamp(0, spec.kv_len)
    return int((end - first).clamp_min(0).sum())


def spot_check(case: Case, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> float:
    """Relative error of the first and last 64 rows of the last head, at the timed size."""
    worst = 0.0
    for rows in (slice(0, 64), slice(spec.q_len - 64, spec.q_len)):
        s = q[-1, -1, rows].double() @ k[-1, -1].double().mT * spec.scale
        kept = band_mask(spec, rows, slice(0, spec.kv_len), q.device)
        if kept is not None:
            s = s.masked_fill(~kept, float("-inf"))
        worst = max(worst, relative(o[-1, -1, rows], torch.softmax(s, -1).nan_to_num(0.0) @ v[-1, -1].double()))
    return worst


def sdpa(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[name]

    is_grouped = case.q_heads != case.kv_heads

    def run(a=q, b=k, c=v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=case.causal, enable_gqa=is_grouped)

    return run


def median_ms(run, ms: int) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=10, rep=ms, return_mode="median")


def time_case(case: Case, rounds: int, ms: int, peers: list[str]) -> dict[str, Any]:
    q, k, v = case.inputs()
    spec, o, lse, run = run_forward(case, q, k, v)
    error = spot_check(case, spec, q, k, v, o)
    row: dict[str, Any] = {"case": case.name, "error": error}
    if not error <= LIMITS[case.dtype][0]:
        return row | {"bad": "wrong result: not timed"}
    flops = 4 * case.head_dim * visible_pairs(spec) * case.batch * case.q_heads
    runs = {"ours": run} | {name: sdpa(name, case, q, k, v) for name in peers}
    if case.backward:
        flops = flops * 5 // 2
        grad_o, _, grads, launches = run_backward(case, spec, q, k, v, o, lse)
        runs = {"ours": lambda: [launch() for launch in launches], "main": launches[1]}
        for name in peers:
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = sdpa(name, case, *leaves)()
            runs[name] = lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, grad_o, retain_graph=True)
            if name == "cudnn":
                wanted = runs[name]()
                row["against cudnn"] = max(relative(a, b.double()) for a, b in zip(grads, wanted))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, launch in runs.items():
            times[name].append(median_ms(launch, ms))
    return row | {name: round(flops / statistics.median(t) / 1e9, 1) for name, t in times.items()}


def with_kernels_apart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and once each the kernels of those that are right."""
    right = {kernel for row in rows if is_right(row) for kernel in row.get("kernels", ())}
    bare = [{name: value for name, value in row.items() if name != "kernels"} for row in rows]
    return {"rows": bare, **({"kernels": sorted(right)} if right else {})}


def is_right(row: dict[str, Any]) -> bool:
    return not (row.get("bad") or row.get("changed") or row.get("dq_far"))


def main() -> int:
    """1 if any row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time", "repeat"))
    parser.add_argument("-j", "--jobs", type=int, default=8)
    parser.add_argument("-k", "--only", default="", help="cases whose name holds this")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--dims", default="128,64")
    parser.add_argument("--lengths", default="512,2048,8192,16384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=int, default=40, help="of measuring a round")
    parser.add_argument("--peers", default="cudnn,fa2")
    parser.add_argument("--times", type=int, default=5000)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]]
    if args.what == "check":
        rows = run_checks(args.jobs, args.only)
        for row in rows:
            if row["bad"]:
                print("BAD", row["case"], *row["bad"], sep="  ", flush=True)
        worst = {n: max((r["errors"].get(n, 0.0) for r in rows), default=0.0) for n in ("o", "lse", "dq", "dk", "dv")}
        errors = "  ".join(f"{n} {e:.1e}" for n, e in worst.items())
        print(f"{sum(not r['bad'] for r in rows)} of {len(rows)} right; worst {errors}", flush=True)
    elif args.what == "time":
        rows = []
        dims, lengths = ([int(n) for n in text.split(",")] for text in (args.dims, args.lengths))
        for case in time_cases(args.backward, dims, lengths):
            if args.only in case.name:
                rows.append(time_case(case, args.rounds, args.ms, [p for p in args.peers.split(",") if p]))
                cells = [f"{k} {v:.1e}" if isinstance(v, float) and v < 0.1 else f"{k} {v}" for k, v in rows[-1].items()]
                print("  ".join(cells), flush=True)
    else:
        rows = []
        for case in repeat_cases():
            rows.append(repeat(case, args.times))
            print({name: value for name, value in rows[-1].items() if name != "kernels"}, flush=True)
    if args.json is None and "OUT" in os.environ:
        args.json = Path(os.environ["OUT"], f"hopper_{args.what}{'_backward' if args.backward else ''}.json")
    if args.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": version("triton")}
        run = {"commit": commit(), "command": command(args.json)}
        args.json.write_text(json.dumps({**machine, **run, **with_kernels_apart(rows)}, indent=1, default=str) + "\n")
    return 0 if all(map(is_right, rows)) else 1


def repeat_cases() -> list[Case]:
    """A ragged problem for each schedule that has barriers of its own: consumers, turns, blocks of their own, Q buffers, CTAs an SM."""
    causal, full = dict(q_len=1111, kv_len=1111, causal=True), dict(q_len=1111, kv_len=1280)
    return [
        *[Case(f"{head_dim} causal", 2, 20, 5, head_dim=head_dim, **causal) for head_dim in (64, 128)],
        *[Case(f"{head_dim} full", 2, 20, 5, head_dim=head_dim, **full) for head_dim in (64, 128)],
        Case("64 window", 2, 20, 5, 1111, 1111, head_dim=64, window=(128, 0)),
        *[Case(f"{head_dim} full", 2, 20, 5, head_dim=head_dim, backward=False, **full) for head_dim in (96, 192, 256)],
        Case("192 long causal", 1, 20, 5, 2111, 2111, head_dim=192, causal=True, backward=False),
        Case("64 middle causal", 1, 20, 5, 3111, 3111, head_dim=64, causal=True),
        Case("64 long causal", 1, 20, 5, 4111, 4111, head_dim=64, causal=True),
        Case("64 wide window", 1, 20, 5, 4111, 4111, head_dim=64, window=(2000, 0), backward=False),
        Case("96 window", 2, 20, 5, 1111, 1111, head_dim=96, window=(128, 0)),
        Case("96 wide window", 1, 20, 5, 2111, 2111, head_dim=96, window=(1000, 0), backward=False),
        Case("256 causal", 2, 20, 5, 1111, 1111, head_dim=256, causal=True, backward=False),
        *[Case(f"{head_dim} short causal", 2, 20, 5, 500, 500, head_dim=head_dim, causal=True) for head_dim in (96, 128)],
        Case("192 short causal", 2, 20, 5, 500, 500, head_dim=192, causal=True, backward=False),
        Case("128 window", 2, 20, 5, 1111, 1111, head_dim=128, window=(128, 0)),
    ]


def repeat(case: Case, times: int) -> dict[str, Any]:
    """o, lse, dk and dv must not change by a bit; dq, whose sums have no order, by no more than rounding."""
    q, k, v = case.inputs()
    spec, o, lse, run = run_forward(case, q, k, v)
    fixed, launches, dq = [o, lse], [run], o
    if case.backward:
        _, _, (dq, *others), backward = run_backward(case, spec, q, k, v, o, lse)
        fixed, launches = [*fixed, *others], [*launches, *backward]
    first, first_dq = [t.clone() for t in fixed], dq.double()
    changed = far = 0
    for _ in range(times):
        for launch in launches:
            launch()
        changed += not all(torch.equal(a, b) for a, b in zip(first, fixed))
        far += not relative(dq, first_dq) <= 1e-3
    kernels = sorted(kernels_of(spec, backward=case.backward))
    return {"case": case.name, "times": times, "changed": changed, "dq_far": far, "kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
