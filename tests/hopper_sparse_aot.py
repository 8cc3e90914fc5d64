"""Compiles the Hopper kernels over a layout for sm_90a without a GPU and prints, as JSON, what ptxas says of each.

    python tests/hopper_sparse_aot.py forward-128-random backward-64-bits

Otherwise as `hopper_aot.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from hopper_aot import facts_of

from attnzoo import layouts
from attnzoo.backends.block_sparse_triton.schedule import Schedule
from attnzoo.backends.hopper.launch import Scratch
from attnzoo.backends.hopper_sparse import launch
from attnzoo.layout import BlockLayout
from attnzoo.spec import AttentionSpec

LENGTH = 1024

LAYOUTS = {
    "random": lambda: layouts.random(LENGTH, density=0.5),
    "narrow": lambda: layouts.random(LENGTH, density=0.5, block=(128, 64)),
    "causal": lambda: layouts.causal(LENGTH),
    "bits": lambda: BlockLayout.from_dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5),
    "documents": lambda: layouts.documents([300, 724]),
    "packed": lambda: layouts.documents([300, 724], causal=True),
    "window": lambda: layouts.sliding_window(LENGTH, window=200),
}


def launch_of(name: str) -> Any:
    """The launch that a name such as forward-128-bits stands for."""
    kernel, head_dim, kind = name.split("-")
    layout = LAYOUTS[kind]()
    q, k = [torch.empty(2, heads, LENGTH, int(head_dim), dtype=torch.bfloat16) for heads in (8, 2)]
    spec = AttentionSpec.of(q, k, k, layout=layout)
    if kernel == "forward":
        return launch.forward_launch(spec, layout, q, k, k, q, torch.empty(q.shape[:-1]))
    schedule = Schedule.of(layout)
    plan = launch.backward_plan(spec, schedule.types, False)
    return launch.main_launch(spec, plan, schedule, (q, k, k, q), Scratch.of(spec, plan), k, k)


if __name__ == "__main__":
    print(json.dumps({name: facts_of(launch_of(name)) for name in sys.argv[1:]}))
