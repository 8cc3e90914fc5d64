"""Builds what pip leaves behind: a dist-info folder with entry points, and the modules they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

GOOD = """
    import attnzoo
    from attnzoo.backends.naive import Naive

    class Good(Naive):
        def __init__(self, name):
            self.name = name
"""


def hook(returned: str, *, before: str = "", signature: str = "", decorator: str = "attnzoo.hookimpl") -> str:
    """A plugin module whose hook returns that expression; `Good(name)` is a backend."""
    lines = [dedent(GOOD), dedent(before), f"@{decorator}", f"def attnzoo_backends({signature}):", f"    return {returned}"]
    return "\n".join(lines) + "\n"


def install(
    folder: Path,
    distribution: str,
    backends: Mapping[str, str] | str,
    modules: Mapping[str, str],
    *,
    version: str = "1.0",
    metadata: str | None = None,
) -> Path:
    """Install a distribution into a folder, which is to be put on sys.path.

    Args:
        backends: backend name -> entry point; or the text of entry_points.txt.
        modules: module name -> source.
        metadata: text of METADATA.
    """
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata or f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if not isinstance(backends, str):
        backends = "[attnzoo.backends]\n" + "".join(f"{name} = {value}\n" for name, value in backends.items())
    (info / "entry_points.txt").write_text(backends)
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(dedent(source))
    return folder
