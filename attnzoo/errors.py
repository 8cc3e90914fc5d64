"""What attnzoo raises beyond TypeError and ValueError, which it keeps for malformed calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["PluginError", "PluginWarning", "UnknownBackendError", "UnsupportedError"]


def in_words(error: BaseException) -> str:
    """`Type: message`; a plugin's error may have a message that raises in its turn."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: (its message can't be read)"


class UnsupportedError(NotImplementedError):
    """A well-formed call that the backends asked for can't serve.

    Attributes:
        rejected: backend name -> all of its reasons, in the order in which they were asked.
        alternatives: names of other backends that could serve the call.
    """

    def __init__(self, rejected: Mapping[str, Sequence[str]], alternatives: Sequence[str] = ()) -> None:
        self.rejected = {name: tuple(reasons) for name, reasons in rejected.items()}
        self.alternatives = tuple(alternatives)
        self.args = (self._message(),)  # not by super(): Dynamo can't trace it, and the reasons would be lost

    def _message(self) -> str:
        lines = ["no backend can serve this call" if len(self.rejected) != 1 else "the backend can't serve this call"]
        for name, reasons in self.rejected.items():
            lines.append(f"  {name}:")
            lines += [f"    - {reason}" for reason in reasons]
        if self.alternatives:
            lines.append(f"  backends that could: {', '.join(self.alternatives)}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rejected, self.alternatives)


class UnknownBackendError(LookupError):
    """No backend of that name is installed, or its plugin failed to load."""


class PluginError(RuntimeError):
    """A plugin broke the rules of the `attnzoo.backends` hook. Raised only when ATTNZOO_STRICT is set."""


class PluginWarning(UserWarning):
    """A plugin was quarantined: its backends are missing, everything else works."""
