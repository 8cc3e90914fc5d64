"""What Triton's interpreter gets wrong and a GPU doesn't: it cuts bits off where fp32 becomes bf16, which a GPU rounds to nearest.

Every bf16 result would be too small, and the kit judges by the rounding of a card. `install` mends it for the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

CUTTING = interpreter._convert_float


def rounding(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """As `interpreter._convert_float`: bits of bf16 as uint16."""
    if not (source.is_fp32() and target.is_bf16()):
        return CUTTING(values, source, target, rounding_mode)
    numbers = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy, which torch may own
    return numbers.to(torch.bfloat16).view(torch.uint16).numpy()


def install() -> None:
    interpreter._convert_float = rounding
