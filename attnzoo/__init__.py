"""attnzoo: where attention kernels live. One interface, many backends, one suite that judges them all.

Names are resolved when first used, so that importing attnzoo imports neither torch nor a plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnzoo.errors import PluginError, PluginWarning, UnknownBackendError, UnsupportedError
from attnzoo.hookspecs import hookimpl

if TYPE_CHECKING:
    from attnzoo import layouts as layouts
    from attnzoo.api import attention, explain, get, names, use
    from attnzoo.backend import Backend, Capabilities
    from attnzoo.inputs import AttentionInputs
    from attnzoo.layout import BlockLayout
    from attnzoo.merge import merge
    from attnzoo.spec import AttentionSpec

__version__ = "0.1.0"

__all__ = [
    "AttentionInputs",
    "AttentionSpec",
    "Backend",
    "BlockLayout",
    "Capabilities",
    "PluginError",
    "PluginWarning",
    "UnknownBackendError",
    "UnsupportedError",
    "attention",
    "explain",
    "get",
    "hookimpl",
    "layouts",
    "merge",
    "names",
    "use",
]

_HOMES = {
    "AttentionInputs": "attnzoo.inputs",
    "AttentionSpec": "attnzoo.spec",
    "Backend": "attnzoo.backend",
    "BlockLayout": "attnzoo.layout",
    "Capabilities": "attnzoo.backend",
    "attention": "attnzoo.api",
    "explain": "attnzoo.api",
    "get": "attnzoo.api",
    "merge": "attnzoo.merge",
    "names": "attnzoo.api",
    "use": "attnzoo.api",
}


def __getattr__(name: str) -> Any:
    if name == "layouts":
        return importlib.import_module("attnzoo.layouts")
    if name not in _HOMES:
        raise AttributeError(f"module 'attnzoo' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
