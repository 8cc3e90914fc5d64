"""`attnzoo info`: what a bug report needs: versions, devices, backends, plugins and what went wrong with them."""

from __future__ import annotations

import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from attnzoo.cli.output import Format, FormatOption, Section, prints_to_stderr, show

if TYPE_CHECKING:
    from attnzoo.backend import Backend
    from attnzoo.registry import Plugin, Registry

PACKAGES = ("torch", "triton", "einops", "pluggy")


def info(form: FormatOption = Format.TABLE) -> None:
    """Show versions, devices, backends and plugins, with every load error. Imports all plugins."""
    from attnzoo.registry import Registry

    with warnings.catch_warnings(), prints_to_stderr():
        warnings.simplefilter("ignore")  # the tables tell what failed
        registry = Registry.installed()
        registry.load(registry.names())
        data = {
            "versions": versions(),
            "devices": devices(),
            "backends": [describe_backend(registry, name) for name in registry.names()],
            "plugins": [describe_plugin(registry, plugin) for plugin in registry.plugins()],
            "failures": registry.failures(),
        }
    show(data, _sections(data), form)


def versions() -> dict[str, str]:
    """Package or system -> version; "not installed" where it is missing."""
    from attnzoo import __version__

    found = {"attnzoo": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> list[dict[str, str]]:
    """The CPU, then every device of this machine's accelerator."""
    import torch

    found = [{"device": "cpu", "name": platform.machine(), "detail": f"{torch.get_num_threads()} threads"}]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return found
    for index in range(torch.accelerator.device_count()):
        name, detail = accelerator.type, ""
        if accelerator.type == "cuda":
            card = torch.cuda.get_device_properties(index)
            name, detail = card.name, f"compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"
        found.append({"device": f"{accelerator.type}:{index}", "name": name, "detail": detail})
    return found


def describe_backend(registry: Registry, name: str) -> dict[str, Any]:
    """What a backend claims, and what it runs on here; only its name if it could not be loaded."""
    from attnzoo.errors import UnknownBackendError

    plugin = registry.plugin_of(name)
    entry = {"backend": name, "distribution": plugin.distribution if plugin else "declared twice"}
    try:
        backend = registry.get(name)
    except UnknownBackendError:
        return {**entry, "state": "broken"}
    claims = backend.capabilities
    return {
        **entry,
        "state": "loaded",
        "devices": sorted(claims.devices) or ["any"],
        "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in claims.dtypes),
        "head_dims": {**dict(zip(("least", "most"), claims.head_dims)), "multiples_of": claims.head_dim_multiple},
        "forward": sorted(claims.forward),
        "backward": sorted(claims.backward),
        "here": _runs_here(backend),
    }


def _runs_here(backend: Backend) -> str:
    """The most demanding small problem that it takes on this machine, or its reasons."""
    from attnzoo import trial
    from attnzoo.errors import in_words

    everything = [problem for device in trial.devices() for problem in trial.problems(device)]
    try:
        problem, reasons = trial.refusals(backend, everything)
    except KeyboardInterrupt:  # the user's own
        raise
    except BaseException as error:  # SystemExit too: a plugin's doing
        return f"unsupported_reasons raised {in_words(error)}"
    return f"runs on {problem}" if problem else "; ".join(reasons)


def describe_plugin(registry: Registry, plugin: Plugin) -> dict[str, Any]:
    from attnzoo import __version__

    error = registry.error_of(plugin)
    return {
        "distribution": plugin.distribution,
        "version": plugin.version or __version__,
        "module": plugin.value,
        "backends": list(plugin.names),
        "state": "broken" if error else "loaded",
        "error": error or "",
    }


def _sections(data: dict[str, Any]) -> list[Section]:
    def section(title: str, entries: list[dict[str, Any]], columns: tuple[str, ...]) -> Section:
        rows = [tuple(_cell(entry.get(column, "")) for column in columns) for entry in entries]
        return Section(title, tuple(column.replace("_", " ") for column in columns), rows)

    failures = [{"what": what, "error": error} for what, error in data["failures"].items()]
    return [
        Section("Versions", ("package", "version"), list(data["versions"].items())),
        section("Devices", data["devices"], ("device", "name", "detail")),
        section("Backends", data["backends"], ("backend", "distribution", "state", "devices", "dtypes", "head_dims", "here")),
        section("Plugins", data["plugins"], ("distribution", "version", "module", "backends", "state")),
        *([section("Failures", failures, ("what", "error"))] if failures else []),
    ]


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        dims = f"{value['least']} to {value['most']}" if value["most"] < 2**31 else f"from {value['least']}"
        return dims if value["multiples_of"] == 1 else f"{dims} by {value['multiples_of']}"
    return str(value)
