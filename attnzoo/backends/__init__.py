"""The built-in backends, which come in through the same hook as everybody's."""

from __future__ import annotations

from attnzoo.backend import Backend
from attnzoo.hookspecs import hookimpl


@hookimpl
def attnzoo_backends() -> list[Backend]:
    from attnzoo.backends.block_sparse import BlockSparse
    from attnzoo.backends.flash import Flash
    from attnzoo.backends.naive import Naive
    from attnzoo.backends.tiled import Tiled

    return [BlockSparse(is_interpreted=False), Flash(is_interpreted=False), Naive(), Tiled()]
