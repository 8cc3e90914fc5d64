"""Registry: the known backends, the plugins they come from, and the choice among them. Imports no torch."""

from __future__ import annotations

import difflib
import os
import re
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from attnzoo import hookspecs
from attnzoo.errors import PluginError, PluginWarning, UnknownBackendError, UnsupportedError, in_words

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

    def is_being_imported(self) -> bool:
        """Whether its module is halfway through its import, and itself asks for a backend."""
        module = sys.modules.get(self.value.partition(":")[0].strip())
        return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.value})".replace("  ", " ")


BUILT_IN = Plugin("attnzoo", "", "attnzoo.backends", ("block_sparse", "flash", "naive", "tiled"))
PREFERENCE = ("flash", "block_sparse", "tiled", "naive")  # flash takes no layout: with one it is block_sparse
RESERVED = frozenset({AUTO, *PREFERENCE})


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
        self._unreported: list[str] = []
        self._strict = strict
        self._lock = threading.Lock()
        self._found = tuple(plugins)
        self._declare()
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

    def _declare(self) -> None:
        claims: dict[str, list[Plugin]] = defaultdict(list)
        for plugin in self._found:
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
            owners = " and ".join(sorted(f"{plugin.distribution} {plugin.version}".strip() for plugin in claimants))
            self._conflicts[name] = f"backend {name!r} is declared by {owners}; uninstall one, or allow one with ATTNZOO_PLUGINS"
            if self._strict:
                raise PluginError(self._conflicts[name])

    def names(self) -> tuple[str, ...]:
        """Every known backend, sorted; imports nothing."""
        return tuple(sorted({*self._backends, *self._plugins, *self._conflicts}))

    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin found, quarantined ones and those of contested names included."""
        return self._found

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
        if not isinstance(name, str):
            raise TypeError(f"backend is {name!r}, a {type(name).__name__}; it takes a name")
        found = self._backends.get(name)
        if found is not None:
            return found
        self._load(name)
        if name in self._backends:
            return self._backends[name]
        raise UnknownBackendError(self._unknown_message(name))

    def load(self, names: Iterable[str]) -> None:
        """Import what stands behind these names, quarantining what fails.

        Raises:
            UnknownBackendError: a name is not known.
        """
        for name in names:
            if name not in self._backends:
                self.require_known((name,))
                self._load(name)

    def report(self) -> None:
        """Warn of the plugins quarantined since the last report; each is recorded already, should that raise."""
        while self._unreported:
            warnings.warn(self._unreported.pop(0), PluginWarning, stacklevel=2)

    def require_known(self, names: Iterable[str]) -> None:
        """Raise UnknownBackendError unless each name is known; imports nothing."""
        known = {*self.names(), AUTO}
        for name in names:
            if name not in known:
                raise UnknownBackendError(self._unknown_message(name))

    def _unknown_message(self, name: str) -> str:
        if name in self._conflicts:
            return self._conflicts[name]
        plugin = self._plugins.get(name)
        if plugin in self._failures:
            lines = [f"backend {name!r} could not be loaded: its plugin {plugin} is quarantined: {self._failures[plugin]}"]
        elif plugin is not None:
            lines = [f"backend {name!r} is asked for while its plugin {plugin} is being imported; ask later, from within a function"]
        else:
            known = self.names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? Known" if near else "known"
            lines = [f"no backend is named {name!r}; {hint}: {', '.join(known)}"]
        lines += [f"  plugin that failed to load: {who}: {error}" for who, error in self.failures().items()]
        return "\n".join(lines)

    # Loading

    def _load(self, name: str) -> None:
        plugin = self._plugins.get(name)
        if plugin is None or plugin in self._failures:
            return
        try:
            loaded = backends_of(plugin)  # under no lock: a plugin's import may wait for another thread's
        except KeyboardInterrupt:  # the user's own
            raise
        except BaseException as error:  # SystemExit, and what test runners and event loops derive
            if not plugin.is_being_imported():
                self._quarantine(plugin, in_words(error))
        else:
            with self._lock:  # the first thread's backends stay
                for found, backend in loaded.items():
                    if found not in self._conflicts:
                        self._backends.setdefault(found, backend)
        self.report()

    def _quarantine(self, plugin: Plugin, error: str) -> None:
        message = f"attnzoo plugin {plugin} is quarantined: {error}"
        with self._lock:
            is_new = self._failures.setdefault(plugin, error) is error
        if self._strict:
            raise PluginError(message)
        if is_new:
            self._unreported.append(message)

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
        if isinstance(reasons, (list, tuple)) and all([isinstance(reason, str) for reason in reasons]):
            return tuple(reasons)
        return (f"its unsupported_reasons returned {reasons!r}, not a list of strings",)
    except KeyboardInterrupt:  # the user's own
        raise
    except BaseException as error:  # SystemExit, and what test runners and event loops derive
        return (f"its unsupported_reasons raised {in_words(error)}",)


def discover(allowed: str | None = None) -> list[Plugin]:
    """The plugins that installed distributions declare, one a distribution and module; imports none."""
    allow = None if allowed is None else {_canonical(name) for name in allowed.split(",") if name.strip()}
    names: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for point in _declared():
        distribution = (point.dist and point.dist.name) or "unknown"
        if allow is None or _canonical(distribution) in allow:
            version = (point.dist and point.dist.version) or ""
            names[distribution, version, point.value].append(point.name)
    return [Plugin(*key, tuple(dict.fromkeys(found))) for key, found in sorted(names.items())]


def _declared() -> list[EntryPoint]:
    """The entry points of our group; a distribution whose metadata can't be read hides no other's."""
    try:
        return list(entry_points(group=hookspecs.ENTRY_POINT_GROUP))
    except Exception:
        found: dict[str, list[EntryPoint]] = {}
        for distribution in distributions():
            try:
                points = list(distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP))
                found.setdefault(_canonical(distribution.name), points)  # the first on sys.path hides the others
            except Exception:
                continue
        return [point for points in found.values() for point in points]


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def backends_of(plugin: Plugin) -> dict[str, Backend]:
    """Import a plugin and call its hook, holding it to the rules; raises PluginError, or whatever it raises."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)  # one a plugin: a broken one leaves nothing behind
    manager.add_hookspecs(hookspecs)
    manager.register(plugin.load(), name=plugin.distribution)
    manager.check_pending()
    hooks = manager.hook.attnzoo_backends.get_hookimpls()
    if not hooks:
        raise PluginError(f"{plugin.value} has no hook: mark a function attnzoo_backends() with attnzoo.hookimpl")
    if any(hook.wrapper or hook.hookwrapper for hook in hooks):
        raise PluginError("attnzoo_backends() is a hook wrapper; it takes a plain function that returns a list of backends")
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
        if type(backend.api_version) is not int or backend.api_version != API_VERSION:
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
_default_lock = threading.Lock()


def default() -> Registry:
    """The registry of this process, made from the installed distributions on first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Registry.installed()
        _default.report()
    return _default
