"""The two pluggy markers and the one hook through which every backend enters, ours included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from attnzoo.backend import Backend

PROJECT = "attnzoo"
ENTRY_POINT_GROUP = "attnzoo.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def attnzoo_backends() -> list[Backend]:  # type: ignore[empty-body]
    """Return this plugin's backends: exactly those that its entry points name, in any order."""
