"""Training steps of a model: tokens a second and peak memory, for each attention, after it was found right."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import attentions
import torch
from model import BERT_LARGE, GPT2_MEDIUM, LRA, Size, Transformer

from attnzoo.bench.worker import Prepared
from attnzoo.bench.workload import Workload
from attnzoo.registry import default, reasons_against
from attnzoo.testing import ConformanceError

WARM_UP, STEPS = 2, 5


@dataclass(frozen=True)
class Row:
    """A model at a length and batch."""

    name: str
    size: Size
    length: int
    batch: int
    attentions: tuple[str, ...]


DENSE = ("stock", "eager", "sdpa_flash", "sdpa_cudnn", "flex", "fa4", "flash")
SPARSE = ("block_sparse+butterfly", "flex+butterfly", "fa4+butterfly")

FULL = (
    Row("GPT-2 medium", GPT2_MEDIUM, 1024, 16, DENSE),
    Row("GPT-2 medium", GPT2_MEDIUM, 4096, 4, DENSE),
    Row("BERT-large", BERT_LARGE, 512, 32, DENSE),
    Row("LRA encoder", LRA, 1024, 64, DENSE + SPARSE),
    Row("LRA encoder", LRA, 4096, 16, DENSE + SPARSE),
    Row("LRA encoder (Path-X)", LRA, 16384, 4, DENSE + SPARSE),
    Row("LRA encoder (Path-256)", LRA, 65536, 1, DENSE + SPARSE),
)
TINY = Size(layers=2, width=64, heads=2, vocabulary=64, longest=512, causal=True)
SMALL = (
    Row("tiny decoder", TINY, 128, 2, ("stock", "eager", "naive", "tiled", "fa4")),
    Row("tiny encoder", replace(TINY, causal=False), 256, 1, ("stock", "eager", "tiled", "tiled+butterfly")),
)


def measure(rows: tuple[Row, ...], device: str, wanted: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """One dict a row and attention: tokens/s, ms a step, peak GiB and the first loss; or a status and its reason."""
    for row in rows:
        for name in row.attentions:
            if not wanted or name in wanted:
                yield {"model": row.name, "length": row.length, "batch": row.batch, "attention": name, **_attempt(row, name, device)}


def _attempt(row: Row, name: str, device: str) -> dict[str, Any]:
    try:
        if name not in attentions.WITHOUT_ATTNZOO:
            assert_right(row, name, device)
        return {"status": "time", **_steps(row, name, device)}
    except ConformanceError as error:
        return {"status": "wrong", "detail": str(error)[:200]}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "detail": str(error).splitlines()[0][:160]}
    except NotImplementedError as error:  # attnzoo's UnsupportedError, with its reasons
        return {"status": "unsupported", "detail": " ".join(str(error).split())[:200]}
    except Exception as error:
        return {"status": "error", "detail": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def assert_right(row: Row, name: str, device: str) -> None:
    """The conformance kit's rule on the attention's own shape, forward and backward; raises ConformanceError."""
    backend, _, pattern = name.partition("+")
    workload = Workload(
        batch=row.batch,
        heads=row.size.heads,
        kv_heads=row.size.heads,
        length=row.length,
        kv_length=row.length,
        head_dim=row.size.width // row.size.heads,
        dtype="bfloat16",
        causal=row.size.causal,
        direction="both",
        layout=pattern,
        device=device,
    )
    prepared = Prepared.of(default().get(backend), workload)
    reasons = reasons_against(prepared.backend, prepared.spec)
    if reasons:
        raise NotImplementedError("; ".join(reasons))
    prepared.first_call()


def _steps(row: Row, name: str, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    attention = attentions.of(name, causal=row.size.causal, length=row.length, device=device)
    with torch.device(device):
        model = Transformer(row.size, attention)
        ids = torch.randint(row.size.vocabulary, (row.batch, row.length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")

    def step() -> float:
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().item()  # waits for the device

    first = step()
    for _ in range(WARM_UP):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    tokens = row.batch * row.length
    return {
        "first_loss": first,
        "tokens_s": tokens / seconds,
        "ms": seconds * 1e3,
        "spread": (max(times) - min(times)) / 2 / seconds,
        "peak_gib": peak,
    }
