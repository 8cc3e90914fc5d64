"""torch's FlexAttention as attnzoo backends: `flex`, compiled, and `flex_eager`, its unfused reference."""

from __future__ import annotations

from attnzoo import Backend, hookimpl


@hookimpl
def attnzoo_backends() -> list[Backend]:
    from attnzoo_flex.backend import Flex, FlexEager

    return [Flex(), FlexEager()]
