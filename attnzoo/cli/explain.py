"""`attnzoo explain`: which backend would run a call of these shapes, why not the others, and what it would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.cli.output import Format, FormatOption, Section, prints_to_stderr, show, warnings_as_notes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnzoo.layout import LayoutSummary
    from attnzoo.spec import AttentionSpec


def sizes(text: str) -> tuple[int, ...]:
    """`2,8,1024,64`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of sizes such as 2,8,1024,64") from None


def window_bounds(text: str) -> tuple[int | None, ...]:
    """`128,0`, or `none` for an open side."""
    try:
        return tuple(None if part.strip().lower() == "none" else int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no window such as 128,0 or none,0") from None


def names(text: str) -> tuple[str, ...]:
    """`q,k,v`."""
    return tuple(part.strip() for part in text.split(","))


Sizes = Any  # tuple[int, ...], by its parser; typer would read the annotation as a number of arguments
Names = Any  # tuple[str, ...], likewise


def explain(
    q: Annotated[Sizes, typer.Option(parser=sizes, metavar="B,H,S,D", help="Shape of q.")],
    kv_heads: Annotated[int | None, typer.Option(help="Heads of k and v; as q by default.", show_default=False)] = None,
    kv_len: Annotated[int | None, typer.Option(help="Length of k and v; as q by default.", show_default=False)] = None,
    value_dim: Annotated[int | None, typer.Option(help="Head dim of v; as q by default.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of q, k and v.")] = "float16",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda; nothing is allocated on it.")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    align: Annotated[str | None, typer.Option(help="top_left or bottom_right, where the lengths differ.")] = None,
    window: Annotated[Sizes, typer.Option(parser=window_bounds, metavar="LEFT,RIGHT", help="none is an open side.")] = None,
    mask: Annotated[Sizes, typer.Option(parser=sizes, metavar="SIZES", help="Shape of a bool mask.")] = None,
    bias: Annotated[Sizes, typer.Option(parser=sizes, metavar="SIZES", help="Shape of a bias, of q's dtype.")] = None,
    segments: Annotated[bool, typer.Option("--segments", help="With segment ids.")] = False,
    layout: Annotated[Sizes, typer.Option(parser=sizes, metavar="BQ,BKV", help="Block size of a layout of full blocks.")] = None,
    density: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the layout's blocks that are computed.")] = 1.0,
    scale: Annotated[float | None, typer.Option(help="D ** -0.5 by default.", show_default=False)] = None,
    softcap: Annotated[float | None, typer.Option(help="Of the scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="With one fp32 logit a head.")] = False,
    dropout: Annotated[float, typer.Option(help="Probability.")] = 0.0,
    lse: Annotated[bool, typer.Option("--lse", help="Ask for the log-sum-exp too.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    grad: Annotated[Names, typer.Option(parser=names, metavar="NAMES", help="Of q,k,v,bias,sinks: needs a gradient.")] = None,
    backend: Annotated[Names, typer.Option(parser=names, metavar="NAMES", help="In order of preference; auto by default.")] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Explain the choice of a backend from shapes alone. Exit code 1 if none can serve the call."""
    from attnzoo.explanation import Explanation
    from attnzoo.registry import AUTO, Registry

    batch, heads, q_len, dim = _four_sizes(q)
    kv = (batch, heads if kv_heads is None else kv_heads, q_len if kv_len is None else kv_len)
    shapes = {
        "q": q,
        "k": (*kv, dim),
        "v": (*kv, dim if value_dim is None else value_dim),
        "mask": mask,
        "bias": bias,
        "sinks": (heads,) if sinks else None,
    }
    options = {
        "causal": causal,
        "align": align,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout,
        "return_lse": lse,
        "deterministic": deterministic,
    }
    try:
        spec = spec_of(shapes, dtype, device, grad or (), has_segments=segments, **options)
        if layout is not None:
            spec = dataclasses.replace(spec, layout=layout_summary(spec, layout, density))
        with warnings_as_notes(), prints_to_stderr():
            explanation = Explanation.of(Registry.installed(), spec, backend or AUTO)
    except (TypeError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    title = explanation.summary()
    show(explanation.to_dict(), [Section(title, ("backend", "verdict", "reasons"), explanation.rows())], form)
    if explanation.chosen is None:
        raise typer.Exit(1)


def _four_sizes(q: tuple[int, ...]) -> tuple[int, ...]:
    if len(q) != 4:
        raise typer.BadParameter(f"{','.join(map(str, q))} has {len(q)} sizes; it takes four: B,H,S,D", param_hint="'--q'")
    return q


def spec_of(
    shapes: Mapping[str, tuple[int, ...] | None],
    dtype: str,
    device: str,
    grads: Sequence[str],
    *,
    has_segments: bool,
    **options: Any,
) -> AttentionSpec:
    """The spec of a call with tensors of these shapes; none of them is allocated.

    Raises:
        TypeError, ValueError: as `AttentionSpec.of`; also for a dtype, device or gradient that there isn't.
    """
    import torch

    from attnzoo.spec import DTYPES, AttentionSpec

    known = {str(each).removeprefix("torch."): each for each in DTYPES}
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}; it takes {', '.join(known)}")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: {error}") from None
    dtypes = {name: known[dtype] for name in ("q", "k", "v", "bias")} | {"sinks": torch.float32, "mask": torch.bool}
    given: dict[str, Any] = {name: _shaped(name, shape, dtypes[name]) for name, shape in shapes.items() if shape is not None}
    for name in grads:
        if name not in given or name == "mask":
            raise ValueError(f"grad names {name!r}; it takes those of q, k, v, bias, sinks that the call has")
        given[name].requires_grad_()
    if has_segments:
        lengths = (given["q"].shape[2], given["k"].shape[2])
        options["segment_ids"] = tuple(torch.empty(len(given["q"]), n, dtype=torch.int64, device="meta") for n in lengths)
    return dataclasses.replace(AttentionSpec.of(**given, **options), device=place)


def _shaped(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without data."""
    import torch

    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (TypeError, RuntimeError) as error:  # a size that is negative, or beyond 64 bits
        raise ValueError(f"{name} can't have the sizes {shape}: {str(error).splitlines()[0]}") from None


def layout_summary(spec: AttentionSpec, block: tuple[int, ...], density: float) -> LayoutSummary:
    """Of a layout of full blocks, the same for every batch and head."""
    from attnzoo.layout import LayoutSummary
    from attnzoo.layouts.validation import block_size

    block_q, block_kv = block_size(block if len(block) > 1 else block[0])
    blocks = -(-spec.q_len // block_q) * -(-spec.kv_len // block_kv)
    return LayoutSummary(1, 1, block_q, block_kv, full_blocks=round(density * blocks), partial_blocks=0, rules=())
