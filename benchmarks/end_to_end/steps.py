"""Training steps of a model: tokens a second and peak memory, for each attention, after it was found right."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import attentions
import torch
from model import BERT_LARGE, GPT2_MEDIUM, LRA, Size, Transformer

from attnzoo.bench.prepared import Prepared
from attnzoo.bench.timing import synchronize
from attnzoo.bench.workload import Workload
from attnzoo.registry import default, reasons_against
from attnzoo.testing import ConformanceError

WARM_UP, STEPS = 1, 4  # after the first


@dataclass(frozen=True)
class Row:
    """A model at a length and batch."""

    name: str
    size: Size
    length: int
    batch: int
    attentions: tuple[str, ...]


ORDER = ("stock", "flash", "eager", "block_sparse+butterfly", "fa4", "fa4+butterfly", "sdpa_cudnn", "flex+butterfly", "sdpa_flash", "flex")
"""What a run that is cut short has first."""
SPARSE = tuple(name for name in ORDER if "+" in name)
DENSE = tuple(name for name in ORDER if "+" not in name)

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
    """One dict a row and attention: tokens/s, ms a step, peak GiB and the first loss; or a status and its reason.

    One attention after the other, each on every row.
    """
    for row, name in asked_for(rows, wanted):
        yield {"model": row.name, "length": row.length, "batch": row.batch, "attention": name, **_attempt(row, name, device)}


def asked_for(rows: tuple[Row, ...], wanted: tuple[str, ...]) -> list[tuple[Row, str]]:
    names = dict.fromkeys(ORDER + tuple(name for row in rows for name in row.attentions))
    return [(row, name) for name in names for row in rows if name in row.attentions and (not wanted or name in wanted)]


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
    prepared_of(row, name, device).first_call()


def prepared_of(row: Row, name: str, device: str) -> Prepared:
    """The attention alone, on its shape; raises NotImplementedError with the reasons against it."""
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
    return prepared


def compile_one(row: Row, name: str, device: str) -> str:
    """Call the attention once as it is checked and once as the model calls it, and say what became of it."""
    shape = (row.batch, row.length, 3, row.size.heads, row.size.width // row.size.heads)
    try:
        prepared_of(row, name, device).call()()
        qkv = torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        with torch.autocast(device, torch.bfloat16):
            o = attentions.of(name, causal=row.size.causal, length=row.length, device=device)(q, k, v)
            o = o.transpose(1, 2).reshape(row.batch, row.length, row.size.width)
        o.backward(torch.ones_like(o))
        synchronize(torch.device(device))
    except BaseException as error:  # SystemExit too: a plugin's doing
        return f"{name} {row.name} {row.length}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"{name} {row.name} {row.length}: compiled"


def compile_all(rows: tuple[Row, ...], device: str, wanted: tuple[str, ...], processes: int) -> Iterator[str]:
    """What every attention compiles, many processes side by side."""
    jobs = [(row, name) for row, name in asked_for(rows, wanted) if name not in attentions.WITHOUT_ATTNZOO]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, row, name, device) for row, name in jobs]):
            yield done.result()


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
