"""`attnzoo layout`: a preset as numbers and as a picture."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.explain import sizes, spec_of, window_bounds
from attnzoo.cli.output import Format, FormatOption, Section, show

if TYPE_CHECKING:
    from attnzoo.layout import BlockLayout
    from attnzoo.spec import AttentionSpec

PRESETS = (
    "causal",
    "sliding_window",
    "dilated",
    "strided",
    "fixed",
    "butterfly",
    "bigbird",
    "longformer",
    "prefix_lm",
    "documents",
    "random",
)

DEFAULT_LENGTH = 8192

Sizes = Any  # tuple[int, ...], by its parser; typer would read the annotation as a number of arguments


def preset(text: str) -> str:
    """One of PRESETS."""
    if text not in PRESETS:
        raise typer.BadParameter(f"{text!r} is no preset; there are {', '.join(PRESETS)}")
    return text


def layout(
    name: Annotated[str, typer.Argument(metavar="PRESET", parser=preset, help=", ".join(PRESETS), show_default=False)],
    seq: Annotated[
        int | None,
        typer.Option(
            min=0, help="Length of q, and of k and v unless --kv-len says otherwise; 8192, or that of --documents.", show_default=False
        ),
    ] = None,
    kv_len: Annotated[int | None, typer.Option(min=0, help="Length of k and v.", show_default=False)] = None,
    block: Annotated[Sizes, typer.Option(parser=sizes, metavar="B or BQ,BKV", help="Tokens a block.")] = "128",
    align: Annotated[str | None, typer.Option(help="top_left or bottom_right, where the lengths differ.")] = None,
    window: Annotated[Sizes, typer.Option(parser=window_bounds, metavar="LEFT,RIGHT", help="Of sliding_window; N is N,0.")] = None,
    reach: Annotated[int | None, typer.Option(help="Blocks on either side of the diagonal.")] = None,
    step: Annotated[int | None, typer.Option(help="Of dilated.")] = None,
    stride: Annotated[int | None, typer.Option(help="Of strided and fixed.")] = None,
    summary: Annotated[int | None, typer.Option(help="Of fixed.")] = None,
    global_blocks: Annotated[int | None, typer.Option(help="Of longformer and bigbird.")] = None,
    random_blocks: Annotated[int | None, typer.Option(help="Of bigbird.")] = None,
    density: Annotated[float | None, typer.Option(help="Of random.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of random and bigbird.")] = None,
    prefix: Annotated[int | None, typer.Option(help="Of prefix_lm.")] = None,
    documents: Annotated[Sizes, typer.Option(parser=sizes, metavar="LENGTHS", help="Of documents, such as 700,300.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal", help="Of documents.", show_default=False)] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads, for FLOPs and bytes.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, help="D, for FLOPs and bytes.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "bfloat16",
    save: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the picture too; needs matplotlib.")] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show a block layout: blocks, density, FLOPs, bytes and, in a table, its picture."""
    options = {
        "align": align,
        "window": window,
        "reach": reach,
        "step": step,
        "stride": stride,
        "summary": summary,
        "global_blocks": global_blocks,
        "random_blocks": random_blocks,
        "density": density,
        "seed": seed,
        "prefix": prefix,
        "documents": documents,
        "causal": causal,
    }
    try:
        made = made_layout(name, seq, kv_len, block, {option: value for option, value in options.items() if value is not None})
        spec = spec_with(made, heads, head_dim, dtype)
    except (TypeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    facts = numbers(made, spec)
    if save is not None:
        save_picture(made, name, save)
    show({"layout": name, **facts}, [Section("", ("fact", "value"), described(made, facts))], form)
    if form is not Format.JSON:
        typer.echo(f"\n```\n{made}\n```" if form is Format.MD else f"\n{made}")


def made_layout(name: str, seq: int | None, kv_len: int | None, block: tuple[int, ...], options: Mapping[str, Any]) -> BlockLayout:
    """The preset with its options.

    Raises:
        ValueError: an option that the preset does not take, or one of its own that is missing; and as the preset.
    """
    from attnzoo import layouts

    maker = getattr(layouts, name)
    parameters = inspect.signature(maker).parameters
    foreign = [option for option in options if option not in parameters]
    if foreign:
        taken = [option for option in parameters if option not in ("q_len", "kv_len", "block", "device")]
        raise ValueError(
            f"{name} takes no --{_dashed(foreign[0])}; it takes {', '.join('--' + _dashed(option) for option in taken) or 'none'}"
        )
    missing = [option for option, parameter in parameters.items() if parameter.default is parameter.empty and option != "q_len"]
    missing = [option for option in missing if option not in options]
    if missing:
        raise ValueError(f"{name} needs --{_dashed(missing[0])}")
    size = block if len(block) > 1 else block[0]
    if name == "documents":
        total = sum(options["documents"])
        for option, length in (("seq", seq), ("kv-len", kv_len)):
            if length not in (None, total):
                raise ValueError(f"--{option} is {length}; the documents have {total} tokens")
        made: BlockLayout = maker(options["documents"], causal=bool(options.get("causal")), block=size)
        return made
    window = options.get("window")
    if window is not None and len(window) == 1:
        options = {**options, "window": window[0]}
    made = maker(DEFAULT_LENGTH if seq is None else seq, kv_len, block=size, **options)
    return made


def _dashed(option: str) -> str:
    return option.replace("_", "-")


def spec_with(layout: BlockLayout, heads: int, head_dim: int, dtype: str) -> AttentionSpec:
    """A call of one batch entry over the layout, with gradients of q, k and v."""
    shapes = {"q": (1, heads, layout.q_len, head_dim), **{name: (1, heads, layout.kv_len, head_dim) for name in "kv"}}
    spec = spec_of(shapes, dtype, "cpu", ("q", "k", "v"), has_segments=False)
    return dataclasses.replace(spec, layout=layout.summary)


def numbers(layout: BlockLayout, spec: AttentionSpec) -> dict[str, Any]:
    """Blocks, predicted FLOPs and bytes of forward and backward together, and the size of the layout's own lists."""
    from attnzoo.cost import predict

    with_layout, dense = [predict(each, materializes_scores=False) for each in (spec, dataclasses.replace(spec, layout=None))]
    forward = predict(dataclasses.replace(spec, grads=()), materializes_scores=False)
    lists = [*layout.transposed[0].__dict__.values(), *layout.transposed[1].__dict__.values(), *layout.tensors()]
    return {
        "q_len": layout.q_len,
        "kv_len": layout.kv_len,
        "block": [layout.block_q, layout.block_kv],
        "rows": layout.rows,
        "columns": layout.columns,
        "full_blocks": layout.summary.full_blocks,
        "partial_blocks": layout.summary.partial_blocks,
        "density": layout.density,
        "forward_flops": forward.flops,
        "flops": with_layout.flops,
        "dense_flops": dense.flops,
        "hbm_bytes": with_layout.hbm_bytes,
        "layout_bytes": sum(tensor.numel() * tensor.element_size() for tensor in lists),
    }


def described(layout: BlockLayout, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    from attnzoo.explanation import scaled

    return [
        ("lengths", f"{layout.q_len} queries, {layout.kv_len} keys"),
        ("blocks", f"{layout.rows} x {layout.columns} of {layout.block_q} x {layout.block_kv} tokens"),
        ("full, partial", f"{facts['full_blocks']}, {facts['partial_blocks']}"),
        ("density", f"{facts['density']:.4f}"),
        ("forward", f"{scaled(facts['forward_flops'])}FLOP"),
        ("forward and backward", f"{scaled(facts['flops'])}FLOP of {scaled(facts['dense_flops'])}FLOP without a layout"),
        ("bytes moved", f"{scaled(facts['hbm_bytes'])}B"),
        ("lists, transposed ones included", f"{scaled(facts['layout_bytes'])}B"),
    ]


def save_picture(layout: BlockLayout, name: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        typer.echo("error: --save needs matplotlib: pip install 'attnzoo[bench]'", err=True)
        raise typer.Exit(2) from None
    matplotlib.use("agg")
    axes = layout.show()
    axes.set_title(f"{name}, {axes.get_title()}")
    try:
        axes.figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:  # no such folder; an ending that is no format
        typer.echo(f"error: --save: {error}", err=True)
        raise typer.Exit(2) from None
