"""FlashAttention 3 and 4 as attnzoo backends: `fa3` and `fa4`, each if its distribution is installed; `fa2` is in its own module."""

from __future__ import annotations

from attnzoo import Backend, hookimpl


@hookimpl
def attnzoo_backends() -> list[Backend]:
    from attnzoo_flash_attn.fa3 import Fa3
    from attnzoo_flash_attn.fa4 import Fa4

    return [Fa3(), Fa4()]
