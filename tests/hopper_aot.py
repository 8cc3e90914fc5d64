"""Compiles the Hopper kernels for sm_90a without a GPU and prints, as JSON, what ptxas says of each.

    python tests/hopper_aot.py forward-128-causal backward-64-dense pre-128-dense

A process of its own, because the tests run triton in its interpreter. `launch` builds on CPU tensors exactly the
launches that it makes on a GPU; their arguments give the signature.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sass import unset_uniform_registers

from attnzoo.spec import AttentionSpec

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "ragged": dict(kv_len=8001),
    "causal": dict(causal=True),
    "shifted": dict(kv_len=8100, causal=True, align="bottom_right"),
    "window": dict(window=(128, 0)),
    "half": dict(dtype=torch.float16, causal=True),
    "values": dict(value_dim=128),
    "shortcausal": dict(length=512, causal=True),
    "middlecausal": dict(length=4096, causal=True),
    "middlewindow": dict(window=(256, 0)),
    "widewindow": dict(window=(1024, 0)),
    "shortdense": dict(length=512),
    "shortragged": dict(length=300),
    "shortshifted": dict(length=500, kv_len=512, causal=True, align="bottom_right"),
    "causalvalues": dict(value_dim=128, causal=True),
    "narrowvalues": dict(value_dim=64),
}
# One process a line.
PROCESSES = (
    (
        "forward-64-dense",
        "forward-64-causal",
        "forward-64-window",
        "forward-64-shortcausal",
        "forward-64-middlecausal",
        "forward-64-shifted",
    ),
    ("forward-64-ragged", "forward-64-shortdense", "forward-64-shortragged", "forward-64-shortshifted"),
    (
        "forward-128-dense",
        "forward-128-causal",
        "forward-128-shifted",
        "forward-128-window",
        "forward-128-half",
        "forward-128-shortcausal",
        "forward-128-middlewindow",
    ),
    ("forward-128-shortdense", "forward-128-shortragged", "forward-128-shortshifted", "forward-128-widewindow", "forward-64-widewindow"),
    (
        "forward-96-dense",
        "forward-96-causal",
        "forward-96-window",
        "forward-96-shifted",
        "forward-96-widewindow",
        "forward-96-narrowvalues",
    ),
    ("forward-96-ragged", "forward-96-shortdense", "forward-96-shortragged", "forward-96-shortcausal", "forward-96-shortshifted"),
    ("forward-192-dense", "forward-192-causal", "forward-192-window", "forward-192-values", "forward-192-shortcausal"),
    ("forward-192-ragged", "forward-192-shortdense", "forward-192-shortragged", "forward-192-shortshifted", "forward-192-causalvalues"),
    ("forward-256-dense", "forward-256-causal", "forward-256-window", "forward-256-ragged", "forward-256-shifted"),
    ("backward-64-dense", "backward-64-causal", "backward-64-window", "pre-64-dense", "post-64-dense"),
    ("backward-128-dense", "backward-128-causal", "backward-128-window", "backward-128-half", "pre-128-dense", "post-128-dense"),
)
COMPILED = [name for names in PROCESSES for name in names]
INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "ATOMG", "RED", "LDL", "STL", "BAR", "STG.E.128", "STG.E.64", "LDG.E.128")


def spec_of(
    head_dim: int,
    *,
    length: int = 8192,
    kv_len: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> AttentionSpec:
    q = torch.empty(2, 8, length, head_dim, dtype=dtype)
    k = torch.empty(2, 2, kv_len or length, head_dim, dtype=dtype)
    v = torch.empty(2, 2, kv_len or length, value_dim or head_dim, dtype=dtype)
    return AttentionSpec.of(q, k, v, **options)


def launch_of(name: str) -> Any:
    """The launch that a name such as forward-128-causal stands for."""
    from attnzoo.backends.hopper import launch

    kernel, head_dim, variant = name.split("-")
    spec = spec_of(int(head_dim), **VARIANTS[variant])
    q = torch.empty(spec.batch, spec.q_heads, spec.q_len, spec.head_dim, dtype=spec.dtype)
    k = torch.empty(spec.batch, spec.kv_heads, spec.kv_len, spec.head_dim, dtype=spec.dtype)
    lse = torch.empty(q.shape[:-1])
    if kernel == "forward":
        v, o = (t.new_empty(*t.shape[:-1], spec.value_dim) for t in (k, q))
        return launch.forward_launch(spec, q, k, v, o, lse)
    return launch.backward_launches(spec, (q, k, k), q, lse, q, None, (q, k, k))[("pre", "backward", "post").index(kernel)]


def argument_type(value: Any) -> str:
    """The type string that the JIT gives a run-time argument."""
    from triton._utils import canonicalize_dtype

    if isinstance(value, torch.Tensor):
        return "*" + canonicalize_dtype(value.dtype)
    if isinstance(value, (int, float)):
        return "fp32" if isinstance(value, float) else "i32"
    return f"tensordesc<{canonicalize_dtype(value.base.dtype)}{list(value.block_shape)},{value.layout!r}>"


def source_of(run: Any) -> tuple[Any, dict[str, Any]]:
    """The source as the JIT would specialise it, divisibility by 16 marked, and the compile options."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel = run.kernel
    values = dict(zip(kernel.arg_names, run.arguments, strict=True))
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or values[p.name] is None}
    signature = {name: "constexpr" if name in constants else argument_type(values[name]) for name in kernel.arg_names}
    attributes = {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_specialised = not parameter.is_constexpr and not parameter.do_not_specialize
        if is_specialised and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[(i,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), dict(run.options)


def facts_of(run: Any) -> dict[str, Any]:
    """Registers, spills, shared memory, ptxas's warnings and instruction counts of one launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = source_of(run)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        assemble = [tools / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", cubin]
        log = subprocess.run(assemble, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([tools / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    used = re.search(r"Used (\d+) registers", log)
    return {
        "triton": triton.__version__,
        "shared_bytes": compiled.metadata.shared,
        "registers": int(used[1]) if used else None,
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "serialised": [line for line in log.splitlines() if "C7511" in line or "C7512" in line or "wgmma" in line.lower()],
        "unset": unset_uniform_registers(sass),
        "counts": {instruction: len(re.findall(rf"\b{re.escape(instruction)}\b", sass)) for instruction in INSTRUCTIONS},
    }


if __name__ == "__main__":
    print(json.dumps({name: facts_of(launch_of(name)) for name in sys.argv[1:]}))
