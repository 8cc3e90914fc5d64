"""T25: torch.compile. T26: vmap and function transforms. T33: autocast. T27, T28: graphs, streams, devices."""

from __future__ import annotations

from attnzoo.testing.case import Case
from attnzoo.testing.problem import Blocks, Problem, Table, short_dtype

KINDS: dict[str, Problem] = {
    "plain": Problem(q_len=33),
    "causal": Problem(q_len=33, causal=True, return_lse=True, loss="o+lse"),
    "mask-and-bias": Problem(q_len=33, kv_len=40, mask=Table("empty_rows"), bias=Table("random", "1h1k"), grads=("q", "k", "v", "bias")),
    "dropout": Problem(q_len=33, dropout_p=0.3, dropout_seed=2),
    "layout": Problem(q_len=64, layout=Blocks("pairs", (32, 32))),
    "grouped-bshd": Problem(q_heads=4, kv_heads=2, q_len=33, storage=("bshd",) * 3),
}

CASES = [
    *[Case("T25", f"compiled-{name}", problem, check="compiled") for name, problem in KINDS.items()],
    Case("T25", "compiled-no-keys", Problem(q_len=20, kv_len=0, return_lse=True), check="compiled"),
    Case("T25", "compiled-bias-alone", Problem(q_len=20, bias=Table(), grads=("bias",)), check="compiled"),
    Case("T25", "compiled-forward", Problem(q_len=20, grads=()), check="compiled"),
    Case(
        "T25",
        "compiled-layout-and-lse",
        Problem(q_len=40, layout=Blocks("pairs", (64, 64)), return_lse=True, loss="o+lse"),
        check="compiled",
    ),
    Case("T25", "compiled-batch-65536", Problem(batch=65536, q_heads=1, q_len=4, head_dim=16), check="compiled", device="cuda"),
    Case("T25", "compiled-for-other-sizes", Problem(q_len=33, causal=True), check="compiled_for_other_sizes"),
    Case("T25", "compiled-for-other-memory", Problem(batch=1, q_len=12, mask=Table("random")), check="compiled_for_other_memory"),
    *[
        Case("T26", f"{check}-{name}", problem, check=check)
        for check in ("vmapped", "function_transforms")
        for name, problem in (
            ("plain", Problem(q_len=12, kv_len=20)),
            ("causal", Problem(q_len=20, causal=True)),
            ("bias", Problem(q_len=12, kv_len=20, bias=Table("random", "1h1k"))),
            ("layout", Problem(q_len=40, layout=Blocks("causal"))),
        )
    ],
    *[
        Case("T33", f"autocast-{name}-{short_dtype(dtype)}", Problem(dtype=dtype, **options), check="autocast")
        for dtype in ("float16", "bfloat16")
        for name, options in (
            ("plain", {}),
            ("causal", {"causal": True}),
            ("mask", {"mask": Table("random")}),
            ("bias-fp32", {"bias": Table("random", dtype="float32")}),
            ("lse", {"return_lse": True}),
            ("forward", {"grads": ()}),
            ("dropout", {"dropout_p": 0.3, "dropout_seed": 3}),
            ("grouped", {"q_heads": 4, "kv_heads": 2}),
        )
    ],
    *[Case("T27", f"graph-{name}", problem, check="graph_capture", device="cuda") for name, problem in KINDS.items() if name != "layout"],
    # a layout that no seed changes: a graph is replayed on the data of another seed
    Case("T27", "graph-layout", Problem(q_len=64, layout=Blocks("window", (32, 32))), check="graph_capture", device="cuda"),
    *[Case("T27", f"side-stream-{name}", problem, check="side_stream", device="cuda") for name, problem in KINDS.items()],
    Case(
        "T27",
        "graph-tensor-seed",
        Problem(q_len=33, dropout_p=0.3, dropout_seed=2, as_tensor_seed=True),
        check="graph_capture",
        device="cuda",
    ),
    *[Case("T28", f"second-device-{name}", problem, check="second_device", device="cuda") for name, problem in KINDS.items()],
]
