"""The calls whose bytes are counted or timed on a GPU, and the account of each: predictions, made anew whenever they are shown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from unittest import mock

from attnzoo.backends.triton import table
from attnzoo.backends.triton.table import Tile
from attnzoo.bench.workload import Workload
from attnzoo.traffic import HOPPER, Traffic, of_kernels, of_standard

__all__ = ["CASES", "EAGER", "GPT2", "PAPER", "TILED", "TILES", "Case", "account_of_case", "account_of_tile", "accounts_of_paper", "title"]


@dataclass(frozen=True)
class Case:
    """A call whose kernels are counted."""

    backend: str
    workload: Workload


def dense(length: int, direction: str, head_dim: int = 128) -> Workload:
    return Workload(1, 16, 16, length, length, head_dim, "bfloat16", direction=direction, device="cuda")


CASES = {
    f"{kind}-{direction}-{length}": Case(
        "flash" if kind == "dense" else "block_sparse",
        dense(length, direction) if kind == "dense" else dataclasses.replace(dense(length, direction), layout="random:0.25"),
    )
    for length in (8192, 32768)
    for kind in ("dense", "sparse")
    for direction in ("forward", "both")
}
GPT2 = Workload(64, 16, 16, 1024, 1024, 64, "float16", direction="both", device="cuda")
EAGER = "eager, with mask and dropout"
PAPER = {"paper-flash": "flash", "paper-eager": EAGER}
"""Name under ncu -> name in the results."""
TILES = tuple(
    Tile(m, n, warps, 2) for m, n, warps in ((16, 16, 4), (32, 32, 4), (64, 32, 4), (64, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8))
)
TILED = dense(8192, "forward", head_dim=64)


def title(tile: Tile) -> str:
    """Its name in the results."""
    return f"{tile.block_m} x {tile.block_n}"


def account_of_case(case: Case, capability: tuple[int, int] = HOPPER) -> Traffic:
    return of_kernels(case.workload.spec(), capability)


def accounts_of_paper() -> dict[str, Traffic]:
    """Of GPT-2 medium's attention, by the names in the results."""
    spec = GPT2.spec()
    return {"flash": of_kernels(spec), EAGER: of_standard(spec, has_mask_and_dropout=True)}


def account_of_tile(tile: Tile) -> Traffic:
    """Of the portable forward, launched with this tile."""
    with mock.patch.object(table, "tile_for", return_value=tile):
        return of_kernels(TILED.spec(), portable=True)
