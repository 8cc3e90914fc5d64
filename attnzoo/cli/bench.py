"""`attnzoo bench`: which backend is right and fast here, for these shapes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.bench_progress import progress_bar
from attnzoo.cli.bench_report import report
from attnzoo.cli.output import Format, FormatOption, warnings_as_notes

if TYPE_CHECKING:
    from attnzoo.bench.matrix import Matrix
    from attnzoo.bench.results import Results

QUICK_AT_ONCE = 8  # what compiles for long, such as flex on a CPU, keeps nobody else waiting

Names = Annotated[list[str] | None, typer.Option("--backend", metavar="NAME", help="May be repeated; by default all that take the device.")]
Sizes = list[int] | None
Words = list[str] | None


def size(help: str) -> Any:
    return typer.Option(min=1, show_default=False, help=f"{help} May be repeated.")


def word(help: str) -> Any:
    return typer.Option(show_default=False, help=f"{help} May be repeated.")


def bench(
    matrix: Annotated[
        Path | None, typer.Argument(metavar="[MATRIX.toml]", help="What to run; see docs/bench.md.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small matrix: under two minutes on a CPU.")] = False,
    backend: Names = None,
    batch: Annotated[Sizes, size("Batch size.")] = None,
    heads: Annotated[Sizes, size("Query heads.")] = None,
    kv_heads: Annotated[Sizes, size("Heads of k and v; as q by default.")] = None,
    length: Annotated[Sizes, size("Length of q.")] = None,
    kv_length: Annotated[Sizes, size("Length of k and v; as q by default.")] = None,
    head_dim: Annotated[Sizes, size("Head dim.")] = None,
    dtype: Annotated[Words, word("float16, bfloat16, float32 or float64.")] = None,
    direction: Annotated[Words, word("forward, backward or both.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", show_default=False)] = None,
    layout: Annotated[Words, word("Such as random:0.25, sliding_window:512, butterfly or causal.")] = None,
    block: Annotated[Sizes, size("Tokens a block of the layout.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda; an accelerator by default.", show_default=False)] = None,
    cache: Annotated[Words, word("warm, or cold: overwritten before each call.")] = None,
    launch: Annotated[Words, word("eager, or graph: replays of a CUDA graph.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each backend; 5 by default.", show_default=False)] = None,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Measured a turn; 0.1 by default.", show_default=False)] = None,
    timeout: Annotated[float | None, typer.Option(min=1, help="Seconds for an answer; 120 by default.", show_default=False)] = None,
    relative_to: Annotated[str | None, typer.Option(metavar="NAME", help="sdpa by default, or naive.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write results there as they come, as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the output file holds, run the rest.")] = False,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="Run nothing: show these results.")] = None,
    compare: Annotated[Path | None, typer.Option(metavar="OLD.json", help="What is slower or faster than then, beyond the noise.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page with tables and plots. Needs attnzoo[bench].")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write each plot there, as SVG and PNG. Needs attnzoo[bench].")] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Time every backend on a matrix of workloads, each in its own process, right before fast.

    Exit code 1 if a cell is wrong or an error, or slower than in the file to compare with.
    """
    given = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "length": length,
        "kv_length": kv_length,
        "head_dim": head_dim,
        "dtype": dtype,
        "direction": direction,
        "causal": causal,
        "layout": layout,
        "block": block,
        "cache": cache,
        "launch": launch,
    }
    given = {name: value for name, value in given.items() if value is not None and value != []}
    settings: dict[str, Any] = {
        "rounds": rounds,
        "seconds": seconds,
        "timeout": timeout,
        "relative_to": relative_to,
        "backends": tuple(backend or ()) or None,
    }
    try:
        if page is not None or plots is not None:
            _require_matplotlib()
        _require_folders(output, page, plots)
        if resume and output is None:
            raise ValueError("--resume goes on with an --output file, and there is none")
        old = _read(compare) if compare is not None else None
        if load is not None:
            _require_nothing_to_run(
                {"MATRIX.toml": matrix, "--quick": quick or None, "--output": output, "--device": device, **given, **settings}
            )
            results = _read(load)
        else:
            asked = _matrix(matrix, quick, given, device, {name: value for name, value in settings.items() if value is not None})
            results = _run(asked, output, resume)
        report(results, old, page, plots, form)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _matrix(path: Path | None, quick: bool, given: dict[str, Any], device: str | None, settings: dict[str, Any]) -> Matrix:
    """What was asked for: a file, the quick matrix, or one workload of options."""
    from attnzoo.bench.matrix import QUICK_CPU, QUICK_CUDA, Matrix, workloads_of

    if (path is not None) + quick + bool(given) != 1:
        raise ValueError("say what to run: a MATRIX.toml, or --quick, or sizes such as --length 1024; one of them")
    if path is not None:
        return replace(Matrix.from_toml(path), **settings)
    place = device or _accelerator()
    if not quick:
        return Matrix(workloads_of([{**given, "device": place}]), **settings)
    entries = [{**entry, "device": place} for entry in (QUICK_CUDA if place.startswith("cuda") else QUICK_CPU)]
    return Matrix(workloads_of(entries), **({"rounds": 3, "seconds": 0.05, "side_by_side": QUICK_AT_ONCE} | settings))


def _accelerator() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _run(matrix: Matrix, output: Path | None, resume: bool) -> Results:
    from attnzoo.bench.machine import look
    from attnzoo.bench.processes import Contestant
    from attnzoo.bench.results import Results
    from attnzoo.bench.run import contestants, run
    from attnzoo.registry import AUTO, Registry

    if AUTO in matrix.named:
        raise ValueError(f"{AUTO} is a choice among backends, and each is timed by its own name: attnzoo list")
    if output is not None and output.exists() and not resume:
        raise ValueError(f"{output} exists: --resume runs what it does not hold yet")
    with warnings_as_notes():
        registry = Registry.installed()
        registry.require_known(matrix.named)
    device = matrix.workloads[0].device
    results = Results(look(device), path=output)
    if output is not None and output.exists():
        machine, results = results.machine, Results.read(output)
        results.resume(machine)
        results.require_same_settings(rounds=matrix.rounds, seconds=matrix.seconds)
    if matrix.backends:
        taking_part = {name: Contestant(name, timeout=matrix.timeout) for name in matrix.backends}
    else:
        taking_part = contestants(registry.names(), device, matrix.timeout, lambda note: typer.echo(f"note: {note}", err=True))
        for name in matrix.named:  # one that is asked for has its cells, whatever it claims
            taking_part.setdefault(name, Contestant(name, timeout=matrix.timeout))
    cells = sum(matrix.runs(workload, name) for workload in matrix.workloads for name in taking_part)
    if not cells:
        raise ValueError(f"no workload is for {', '.join(taking_part)}" if taking_part else f"no backend takes {device}")
    base = matrix.relative_to or next((name for name in ("sdpa", "naive") if name in taking_part), next(iter(taking_part)))
    results.settings = {"rounds": matrix.rounds, "seconds": matrix.seconds, "relative_to": base}
    results.claim()
    try:
        with progress_bar(cells) as progress:
            run(matrix, taking_part, results, progress)
    except KeyboardInterrupt:
        if output is not None and results.cells:
            count = len(results.cells)
            typer.echo(f"note: {count} of {cells} cells {'is' if count == 1 else 'are'} in {output}: --resume runs the rest", err=True)
        raise
    finally:
        results.drop_claim()
    return results


def _read(path: Path) -> Results:
    from attnzoo.bench.results import Results

    return Results.read(path)


def _require_matplotlib() -> None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'attnzoo[bench]'")


def _require_nothing_to_run(asked: dict[str, Any]) -> None:
    found = [name for name, value in asked.items() if value is not None]
    if found:
        named = ", ".join(name if name.startswith("-") or "." in name else f"--{name.replace('_', '-')}" for name in found)
        raise ValueError(f"--load shows what was measured and runs nothing, so it takes no {named}")


def _require_folders(output: Path | None, page: Path | None, plots: Path | None) -> None:
    """Before anything is measured: what could not be written afterwards."""
    for file in (output, page):
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"{file.parent} is no folder")
        if file is not None and file.is_dir():
            raise ValueError(f"{file} is a folder; it takes a file")
    if plots is not None and plots.exists() and not plots.is_dir():
        raise ValueError(f"{plots} is a file; --plots takes a folder")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    for folder in {output and output.parent, page and page.parent, plots} - {None}:
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"nothing can be written in {folder}: {error.strerror}") from None
