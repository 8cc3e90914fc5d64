"""Loss curves: one small decoder on real text, the same seed and the same batches, one run an attention.

The text is CPython's own documentation topics, `pydoc_data.topics`, which is on every machine; tokens are characters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import attentions
import torch
from model import Size, Transformer
from torch import Tensor

HELD_OUT = 0.1
FULL = {
    "cuda": {"layers": 6, "width": 384, "heads": 6, "length": 512, "batch": 32, "steps": 800},
    "cpu": {"layers": 4, "width": 128, "heads": 4, "length": 128, "batch": 16, "steps": 1200},
}
SMALL = {"layers": 2, "width": 64, "heads": 2, "length": 64, "batch": 8, "steps": 30}
ATTENTIONS = {"cuda": ("eager", "stock", "flash"), "cpu": ("eager", "stock", "tiled")}


def text() -> Tensor:
    """Half a megabyte of characters as ids, in the order of the topics' names."""
    joined = "".join(topics[name] for name in sorted(topics))
    place = {character: number for number, character in enumerate(sorted(set(joined)))}
    return torch.tensor([place[character] for character in joined])


def train(setting: dict[str, int], device: str, names: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """One dict an attention: the training loss of each step and the held-out loss at the end."""
    ids = text()
    held_out = ids[int(len(ids) * (1 - HELD_OUT)) :].to(device)
    ids = ids[: int(len(ids) * (1 - HELD_OUT))].to(device)
    for name in names or ATTENTIONS[device]:
        try:
            yield {"attention": name, **setting, **_run(name, setting, ids, held_out, device)}
        except Exception as error:
            yield {"attention": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def _run(name: str, setting: dict[str, int], ids: Tensor, held_out: Tensor, device: str) -> dict[str, Any]:
    length, batch = setting["length"], setting["batch"]
    vocabulary = int(max(ids.max(), held_out.max())) + 1
    size = Size(setting["layers"], setting["width"], setting["heads"], vocabulary, length, causal=True)
    torch.manual_seed(0)
    model = Transformer(size, attentions.of(name, causal=True, length=length, device=device)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-4, total_steps=setting["steps"], pct_start=0.1)
    generator = torch.Generator().manual_seed(1)  # batches: drawn on the CPU, so alike everywhere
    losses = []
    started = time.perf_counter()
    for _ in range(setting["steps"]):
        loss = _loss(model, _batch(ids, batch, length, generator), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - started
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        checked = [_loss(model, _batch(held_out, batch, length, generator), device) for _ in range(8)]
    return {
        "losses": [round(value, 4) for value in torch.stack(losses).tolist()],
        "held_out": round(float(torch.stack(checked).mean()), 4),
        "seconds": round(seconds, 2),
    }


def _batch(ids: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(ids) - length - 1, (batch, 1), generator=generator)
    return ids[(starts + torch.arange(length + 1)).to(ids.device)]


def _loss(model: Transformer, ids: Tensor, device: str) -> Tensor:
    with torch.autocast(device, torch.bfloat16):
        logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
