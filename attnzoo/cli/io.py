"""`attnzoo io`: FLOPs, bytes and memory of standard attention, the paper's algorithm and our kernels, step by step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.explain import Names, Sizes, layout_summary, names, sizes, spec_of, window_bounds
from attnzoo.cli.output import Format, FormatOption, Section, show

if TYPE_CHECKING:
    from attnzoo.spec import AttentionSpec
    from attnzoo.traffic import Traffic

PAPER_SHAPE = (64, 16, 1024, 64)
PAPER_BLOCK = 256
PAPER = {
    "standard attention": ("66.6", "40.3", "41.7"),
    "FlashAttention": ("75.2", "4.4", "7.3"),
}
"""GFLOPs, GB of device memory and ms on an A100: Dao et al., arXiv 2205.14135, figure 2, GPT-2 medium's attention."""
TOTALS = ("algorithm", "GFLOP", "GB to and from L2", "GB of device memory, at least", "extra memory, GB")
STEPS = ("step", "tile", "GB read", "GB written")


def capability(text: str) -> tuple[int, int]:
    """`9.0`."""
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise typer.BadParameter(f"{text!r} is no compute capability such as 9.0")
    return int(major), int(minor)


def io(
    q: Annotated[Sizes, typer.Option(parser=sizes, metavar="B,H,S,D", help="Shape of q; GPT-2 medium's in the paper by default.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of k and v; as q by default.", show_default=False)] = None,
    kv_len: Annotated[int | None, typer.Option(min=0, help="Length of k and v; as q by default.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "float16",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    align: Annotated[str | None, typer.Option(help="top_left or bottom_right, where the lengths differ.")] = None,
    window: Annotated[Sizes, typer.Option(parser=window_bounds, metavar="LEFT,RIGHT", help="none is an open side.")] = None,
    layout: Annotated[Sizes, typer.Option(parser=sizes, metavar="BQ,BKV", help="Block size of a layout of full blocks.")] = None,
    density: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the layout's blocks that are computed; all by default.", show_default=False),
    ] = None,
    grad: Annotated[Names, typer.Option(parser=names, metavar="NAMES", help="Of q,k,v: needs a gradient; none for the forward.")] = "q,k,v",
    card: Annotated[Any, typer.Option(parser=capability, metavar="X.Y", help="Compute capability: whose tiles.")] = "9.0",
    form: FormatOption = Format.TABLE,
) -> None:
    """Account for the bytes of a call: each step of standard attention, of the paper's algorithm, of our kernels' real tiles.

    With no option also beside the numbers of the paper's table.
    """
    shape = PAPER_SHAPE if q is None else q
    if len(shape) != 4:
        raise typer.BadParameter(f"{','.join(map(str, shape))} has {len(shape)} sizes; it takes four: B,H,S,D", param_hint="'--q'")
    kv = (shape[0], shape[1] if kv_heads is None else kv_heads, shape[2] if kv_len is None else kv_len, shape[3])
    options = {"causal": causal, "align": align, "window": window}
    try:
        if layout is None and density is not None:
            raise ValueError(f"density is {density:g}, the share of a layout's blocks, and there is no --layout")
        wanted = [name for name in grad if name and name != "none"]
        spec = spec_of({"q": shape, "k": kv, "v": kv}, dtype, "cpu", wanted, has_segments=False, **options)
        if layout is not None:
            spec = dataclasses.replace(spec, layout=layout_summary(spec, layout, 1.0 if density is None else density))
    except (TypeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    accounts = _accounts(spec, card)
    sections = [_totals(spec, accounts), *[_steps(title, account) for title, account in accounts.items()]]
    if q is None and kv == PAPER_SHAPE and spec.layout is None and spec.band == (None, None):
        sections.append(_paper())
    show({title: dataclasses.asdict(account) for title, account in accounts.items()}, sections, form)


def _accounts(spec: AttentionSpec, card: tuple[int, int]) -> dict[str, Traffic]:
    from attnzoo.traffic import of_kernels, of_paper, of_standard, reasons_against_kernels

    found = {"standard attention": of_standard(spec), "with mask and dropout as steps": of_standard(spec, has_mask_and_dropout=True)}
    if spec.layout is None and spec.band == (None, None):
        found[f"the paper's, {PAPER_BLOCK} keys a block"] = of_paper(spec, PAPER_BLOCK)
    reasons = reasons_against_kernels(spec)
    if reasons:
        typer.echo(f"note: nothing of ours: {'; '.join(reasons)}", err=True)
        return found
    ours = of_kernels(spec, card)
    portable = of_kernels(spec, card, portable=True)
    found[f"ours on {card[0]}.{card[1]}"] = ours
    if portable.steps != ours.steps:
        found["ours, portable kernels"] = portable
    return found


def _totals(spec: AttentionSpec, accounts: dict[str, Traffic]) -> Section:
    from attnzoo.explanation import described

    rows = [
        (title, _giga(each.flops, decimals=1), _gigabytes(each.moved), _gigabytes(each.compulsory), _gigabytes(each.extra))
        for title, each in accounts.items()
    ]
    return Section(described(spec), TOTALS, rows)


def _steps(title: str, account: Traffic) -> Section:
    rows = [
        (step.name, f"{step.tile[0]} x {step.tile[1]}" if step.tile else "", _gigabytes(step.read), _gigabytes(step.written))
        for step in account.steps
    ]
    return Section(title, STEPS, rows)


def _paper() -> Section:
    title = "the paper's table, on an A100 (its GFLOP are 1/12 to 1/13 of what this shape's products take: compare their ratio)"
    return Section(title, ("algorithm", "GFLOP", "GB of device memory", "ms"), [(name, *numbers) for name, numbers in PAPER.items()])


def _gigabytes(count: int) -> str:
    return _giga(count, decimals=3)


def _giga(count: int, *, decimals: int) -> str:
    """Of a count that so many decimals don't show, its first digits."""
    value = count / 1e9
    return f"{value:.3g}" if value < 10**-decimals else f"{value:,.{decimals}f}"
