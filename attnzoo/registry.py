"""Registry: the known backends, the plugins they come from, and the choice among them. Imports no torch."""

from __future__ import annotations

import difflib
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from attnzoo import hookspecs
from attnzoo.errors import PluginError, PluginWarning, UnknownBackendError, UnsupportedError

if TYPE_CHECKING:
    from attnzoo.backend import Backend
    from attnzoo.spec import AttentionSpec

__all__ = ["BUILT_IN", "Decision", "Plugin", "Registry", "default"]

AUTO = "auto"
API_VERSION = 1


@dataclass(frozen=True)
class Plugin:
    """One module of one distribution, and the backend names that its entry points declare."""

    distribution: str
    version: str
    value: str
    names: tuple[str, ...]

    def load(self) -> Any:
        """Import the module, and nothing before that."""
        return EntryPoint(self.names[0], self.value, hookspecs.ENTRY_POINT_GROUP).load()


BUILT_IN = Plugin("attnzoo", "", "attnzoo.backends", ("naive", "tiled"))
PREFERENCE = ("block_sparse", "flash", "tiled", "naive")
RESERVED = frozenset(PREFERENCE)


@dataclass(frozen=True)
class Decision:
    """Which backend serves a call, and why the others asked before it don't.

    Attributes:
        chosen: the backend, None if nobody can.
        rejected: name -> all of its reasons, in the order asked.
    """

    chosen: Backend | None
    rejected: Mapping[str, tuple[str, ...]]


class Registry:
    """Backends by name. A plugin is imported when one of its names is asked for; one that fails is
    quarantined with its error kept, and never stops another.

    Args:
        backends: ready backends, for tests and for embedding.
        plugins: where further names come from.
        preference: the order of automatic choice; names that are not known are passed over.
        strict: raise PluginError where a plugin would be quarantined.
    """

    def __init__(
        self,
        backends: Iterable[Backend] = (),
        *,
        plugins: Iterable[Plugin] = (),
        preference: tuple[str, ...] = PREFERENCE,
        strict: bool = False,
    ) -> None:
        self._backends: dict[str, Backend] = {backend.name: backend for backend in backends}
        self._plugins: dict[str, Plugin] = {}
        self._failures: dict[Plugin, str] = {}
        self._conflicts: dict[str, str] = {}
        self._strict = strict
        self._lock = threading.RLock()
        self._declare(plugins)
        known = self.names()
        self.preference = tuple(name for name in preference if name in known)

    @classmethod
    def installed(cls, environ: Mapping[str, str] = os.environ) -> Registry:
        """The built-ins and every installed plugin that `ATTNZOO_PLUGINS` allows.

        `ATTNZOO_PLUGINS`: comma-separated distribution names; unset allows all, empty none.
        `ATTNZOO_STRICT`: anything but empty and 0 raises where a plugin would be quarantined.
        """
        strict = environ.get("ATTNZOO_STRICT", "") not in ("", "0")
        return cls(plugins=[BUILT_IN, *discover(environ.get("ATTNZOO_PLUGINS"))], strict=strict)

    def _declare(self, plugins: Iterable[Plugin]) -> None:
        claims: dict[str, list[Plugin]] = defaultdict(list)
        for plugin in plugins:
            reserved = sorted(RESERVED.intersection(plugin.names)) if plugin is not BUILT_IN else []
            if reserved:
                self._quarantine(plugin, f"declares {', '.join(reserved)}: the names of attnzoo's own backends are reserved")
                continue
            for name in plugin.names:
                claims[name].append(plugin)
        for name, claimants in claims.items():
            if len(claimants) == 1:
                self._plugins[name] = claimants[0]
                continue
            owners = " and ".join(sorted(f"{p.distribution} {p.version}".strip() for p in claimants))
            self._conflicts[name] = f"backend {name!r} is declared by {owners}; uninstall one, or allow one with ATTNZOO_PLUGINS"

    def names(self) -> tuple[str, ...]:
        """Every known backend, sorted; imports nothing."""
        return tuple(sorted({*self._backends, *self._plugins, *self._conflicts}))

    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin found, quarantined ones included."""
        return tuple(dict.fromkeys([*self._plugins.values(), *self._failures]))

    def plugin_of(self, name: str) -> Plugin | None:
        """Where a backend comes from; None if it was handed over ready, is declared twice or is not known."""
        return self._plugins.get(name)

    def error_of(self, plugin: Plugin) -> str | None:
        """Why a plugin is quarantined; None if it isn't, or wasn't imported yet."""
        return self._failures.get(plugin)

    def failures(self) -> dict[str, str]:
        """What went wrong so far: plugin ("distribution: module") or backend name -> error."""
        broken = {f"{plugin.distribution}: {plugin.value}": error for plugin, error in self._failures.items()}
        return {**broken, **self._conflicts}

    def get(self, name: str) -> Backend:
        """The backend of that name, its plugin imported if need be.

        Raises:
            UnknownBackendError: not installed, declared twice, or its plugin is quarantined.
        """
        found = self._backends.get(name)
        if found is not None:
            return found
        if not isinstance(name, str):
            raise TypeError(f"backend is {name!r}, a {type(name).__name__}; it takes a name")
        self._load(name)
        if name in self._backends:
            return self._backends[name]
        raise UnknownBackendError(self._unknown_message(name))

    def load(self, names: Iterable[str]) -> None:
        """Import what stands behind these names, quarantining what fails."""
        for name in names:
            if name not in self._backends:
                self._load(name)

    def require_known(self, names: Iterable[str]) -> None:
        """Raise UnknownBackendError unless each name is known; imports nothing."""
        known = {*self.names(), AUTO}
        for name in names:
            if name not in known:
                raise UnknownBackendError(self._unknown_message(name))

    def _unknown_message(self, name: str) -> str:
        if name in self._conflicts:
            return self._conflicts[name]
        lines = []
        plugin = self._plugins.get(name)
        if plugin in self._failures:
            lines.append(f"backend {name!r} could not be loaded: its plugin {plugin.distribution} {self._failures[plugin]}")
        else:
            known = self.names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"no backend is named {name!r}{hint} Known: {', '.join(known)}")
        lines += [f"  plugin that failed to load: {who}: {error}" for who, error in self.failures().items()]
        return "\n".join(dict.fromkeys(lines))

    # Loading

    def _load(self, name: str) -> None:
        plugin = self._plugins.get(name)
        with self._lock:
            if plugin is None or plugin in self._failures or name in self._backends:
                return
            try:
                loaded = backends_of(plugin)
            except (Exception, SystemExit) as error:  # KeyboardInterrupt is the user's own
                self._quarantine(plugin, f"{type(error).__name__}: {error}")
            else:
                self._backends.update({n: b for n, b in loaded.items() if n not in self._conflicts})

    def _quarantine(self, plugin: Plugin, error: str) -> None:
        self._failures[plugin] = error
        message = f"attnzoo plugin {plugin.distribution} ({plugin.value}): {error}"
        if self._strict:
            raise PluginError(message)
        warnings.warn(message, PluginWarning, stacklevel=4)

    # Choice

    def order(self, choice: str | tuple[str, ...]) -> tuple[str, ...]:
        """The names to ask, in order of preference."""
        if isinstance(choice, str):
            return self.preference if choice == AUTO else (choice,)
        if not isinstance(choice, tuple):
            raise TypeError(f"backend is {choice!r}, a {type(choice).__name__}; it takes a name or a tuple of names")
        if not choice:
            raise ValueError("backend is an empty tuple; it takes a name or a tuple of names")
        for name in choice:
            if not isinstance(name, str):
                raise TypeError(f"backend is {choice!r}, which holds a {type(name).__name__}; it takes a name or a tuple of names")
        if AUTO not in choice:
            return choice
        return tuple(dict.fromkeys([part for name in choice for part in (self.preference if name == AUTO else (name,))]))

    def decide(self, spec: AttentionSpec, choice: str | tuple[str, ...]) -> Decision:
        """The first backend of the order that has no reason against the call."""
        rejected: dict[str, tuple[str, ...]] = {}
        for name in self.order(choice):
            backend = self.get(name)
            reasons = reasons_against(backend, spec)
            if not reasons:
                return Decision(backend, rejected)
            rejected[name] = reasons
        return Decision(None, rejected)

    def select(self, spec: AttentionSpec, choice: str | tuple[str, ...]) -> Backend:
        """As `decide`, or UnsupportedError with every reason and the backends that could."""
        decision = self.decide(spec, choice)
        if decision.chosen is None:
            raise UnsupportedError(decision.rejected, self._able(spec, decision.rejected))
        return decision.chosen

    def _able(self, spec: AttentionSpec, but: Iterable[str]) -> list[str]:
        """Of the backends already loaded or built in, those that could serve the call."""
        names = dict.fromkeys([*self.preference, *self._backends])
        return [name for name in names if name not in but and not reasons_against(self.get(name), spec)]


def reasons_against(backend: Backend, spec: AttentionSpec) -> tuple[str, ...]:
    """The backend's reasons; one that fails to answer is itself a reason."""
    try:
        reasons = backend.unsupported_reasons(spec)
    except Exception as error:
        return (f"its unsupported_reasons raised {type(error).__name__}: {error}",)
    if isinstance(reasons, (list, tuple)) and all([isinstance(reason, str) for reason in reasons]):
        return tuple(reasons)
    return (f"its unsupported_reasons returned {reasons!r}, not a list of strings",)


def discover(allowed: str | None = None) -> list[Plugin]:
    """The plugins that installed distributions declare, one a distribution and module; imports none."""
    allow = None if allowed is None else {_canonical(name) for name in allowed.split(",") if name.strip()}
    names: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for point in entry_points(group=hookspecs.ENTRY_POINT_GROUP):
        distribution = point.dist.name if point.dist else "unknown"
        if allow is None or _canonical(distribution) in allow:
            version = point.dist.version if point.dist else ""
            names[distribution, version, point.value].append(point.name)
    return [Plugin(*key, tuple(dict.fromkeys(found))) for key, found in sorted(names.items())]


def _canonical(distribution: str) -> str:
    return distribution.strip().lower().replace("_", "-").replace(".", "-")


def backends_of(plugin: Plugin) -> dict[str, Backend]:
    """Import a plugin and call its hook, holding it to the rules; raises PluginError, or whatever it raises."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)  # one a plugin: a broken one leaves nothing behind
    manager.add_hookspecs(hookspecs)
    manager.register(plugin.load(), name=plugin.distribution)
    manager.check_pending()
    if not manager.hook.attnzoo_backends.get_hookimpls():
        raise PluginError(f"{plugin.value} has no hook: mark a function attnzoo_backends() with attnzoo.hookimpl")
    results = manager.hook.attnzoo_backends()
    if len(results) != 1 or not isinstance(results[0], (list, tuple)):
        raise PluginError(f"attnzoo_backends() returned {results[0] if results else None!r}, not a list of backends")
    return _checked(plugin, results[0])


def _checked(plugin: Plugin, backends: Iterable[object]) -> dict[str, Backend]:
    from attnzoo.backend import Backend, Capabilities

    found: dict[str, Backend] = {}
    for backend in backends:
        if not isinstance(backend, Backend):
            raise PluginError(f"attnzoo_backends() returned {backend!r}, not an attnzoo.Backend")
        name = getattr(backend, "name", None)
        if not isinstance(name, str):
            raise PluginError(f"a {type(backend).__name__} has name {name!r}, not a string")
        if backend.api_version != API_VERSION:
            raise PluginError(f"backend {name!r} has api_version {backend.api_version!r}; this attnzoo takes {API_VERSION}")
        if not isinstance(getattr(backend, "capabilities", None), Capabilities):
            raise PluginError(f"backend {name!r} has no attnzoo.Capabilities in its capabilities")
        if name in found:
            raise PluginError(f"attnzoo_backends() returned two backends named {name!r}")
        found[name] = backend
    if set(found) != set(plugin.names):
        raise PluginError(f"attnzoo_backends() returned {sorted(found)}, but its entry points declare {sorted(plugin.names)}")
    return found


_default: Registry | None = None


def default() -> Registry:
    """The registry of this process, made from the installed distributions on first use."""
    global _default
    if _default is None:
        _default = Registry.installed()
    return _default
