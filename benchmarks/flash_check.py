"""`flash_gpu.py check`, `recheck` and `variants`: every kind of call against naive in fp32, or run once for a sanitizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flash_calls import PORTABLE, TOLERANCE, values_and_grads, worst_error
from flash_cases import FEATURES, HOPPER_CALLS, call_of

from attnzoo.backends.flash import Flash
from attnzoo.backends.naive import Naive

Save = Callable[[str, Any], None]


def check(save: Save) -> None:
    """Every feature in every dtype, then what only a GPU can show."""
    from flash_probes import PROBES

    checked(save, tuple(TOLERANCE), PROBES)


def recheck(save: Save) -> None:
    """The part of it that a change of tiles can break."""
    from flash_probes import bitwise, far_elements, shifts

    checked(save, (torch.bfloat16,), (far_elements, shifts, bitwise))


def checked(save: Save, dtypes: tuple[torch.dtype, ...], probes: tuple[Callable[[], None], ...]) -> None:
    from flash_compile import compile_features
    from flash_probes import failing

    compile_features(save, dtypes)
    bad = [*wrong_features(dtypes, FEATURES), *failing(probes)]
    print(f"check: {len(dtypes) * len(FEATURES) + len(probes)} cases, {len(bad)} bad", *bad, sep="\n  ", flush=True)
    save("check", bad)


def wrong_features(dtypes: Iterable[torch.dtype], names: Iterable[str], device: str = "cuda") -> list[str]:
    """Which calls are further from naive in fp32 than their dtype allows, or fail, and how."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    bad = []
    for dtype, name in itertools.product(dtypes, names):
        try:
            error = error_of(name, dtype, device)
        except Exception as failure:
            bad.append(f"{name} {dtype}: {type(failure).__name__} {str(failure)[:300]}")
            continue
        if not error <= TOLERANCE[dtype]:
            bad.append(f"{name} {dtype}: {error:.2e}")
    return bad


def error_of(name: str, dtype: torch.dtype, device: str) -> float:
    tensors, options, upstream = call_of(name, dtype, device)
    exact = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    return worst_error(values_and_grads(PORTABLE, tensors, options, upstream), values_and_grads(Naive(), exact, options, upstream))


def variants(save: Save) -> None:
    """Forward and backward of every kind of call in both half precisions and fp32; results are looked at for NaN alone."""
    calls = [(PORTABLE, *call) for call in itertools.product(FEATURES, TOLERANCE)]
    calls += [(Flash(kernels="hopper"), name, torch.bfloat16) for name in HOPPER_CALLS]
    for call in calls:
        run_variant(*call)
    print(f"{len(calls)} variants", flush=True)
    save("variants", len(calls))


def run_variant(backend: Flash, name: str, dtype: torch.dtype, device: str = "cuda") -> None:
    """
    Raises:
        AssertionError: a value or a gradient is NaN.
    """
    for value in values_and_grads(backend, *call_of(name, dtype, device)):
        if value.isnan().any():
            raise AssertionError(f"{name} {dtype}: nan")
    print(f"ran {name} {dtype}", flush=True)
