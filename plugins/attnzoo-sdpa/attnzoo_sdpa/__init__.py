"""torch's scaled_dot_product_attention as attnzoo backends: `sdpa` and its kernels by name."""

from __future__ import annotations

from attnzoo import Backend, hookimpl


@hookimpl
def attnzoo_backends() -> list[Backend]:
    from attnzoo_sdpa.backend import Sdpa
    from attnzoo_sdpa.kernels import CPU_FLASH, CUDNN, EFFICIENT, FLASH, MATH

    return [
        Sdpa("sdpa", (CUDNN, FLASH, EFFICIENT, CPU_FLASH, MATH)),
        Sdpa("sdpa_flash", (FLASH, CPU_FLASH)),
        Sdpa("sdpa_cudnn", (CUDNN,)),
        Sdpa("sdpa_efficient", (EFFICIENT,)),
        Sdpa("sdpa_math", (MATH,)),
    ]
