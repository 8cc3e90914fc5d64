"""What lies around the tensors: uninitialised outputs, slack, freed blocks, earlier addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.testing.checks.accuracy import judge, unchanged
from attnzoo.testing.failure import NotApplicable, require
from attnzoo.testing.inputs import Call, make_call
from attnzoo.testing.oracle import Results
from attnzoo.testing.problem import Problem
from attnzoo.testing.storage import POISON_BYTE, STORAGES, bits, bytes_of
from attnzoo.testing.subject import Subject

__all__ = [
    "aligned_then_offset",
    "guarded_allocations",
    "huge_strides",
    "outputs_are_own",
    "poisoned_allocations",
    "poisoned_free_blocks",
    "poisoned_slack",
    "same_bits",
]

MARGIN = 64  # elements on either side of every allocation
NUMBER_BYTE = 0x3F  # repeated, an ordinary number in every float dtype


def poisoned_free_blocks(subject: Subject, problem: Problem, device: torch.device) -> None:
    """An allocator that hands out memory full of NaN: right only if every element of the results is written."""
    call = make_call(problem, device)
    for numel in (2**8, 2**12, 2**16, 2**18):
        blocks = [torch.full((numel,), torch.nan, device=device, dtype=dtype) for dtype in (torch.float32, call.q.dtype) for _ in range(2)]
        del blocks
    judge(subject.run(call), problem, device)


def poisoned_allocations(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Every torch.empty of the backend starts as NaN, with canaries on both sides that must survive."""
    call = make_call(problem, device)
    with unchanged(call), guarded_allocations():
        results = subject.run(call)
    judge(results, problem, device)


def outputs_are_own(subject: Subject, problem: Problem, device: torch.device) -> None:
    """What is written into o and lse, element by element, reaches no input: without gradients, and with them if they are served."""
    for grads in ((), ("q", "k", "v")):
        call = make_call(replace(problem, grads=grads), device)
        if grads and subject.reasons(call):
            continue
        o, lse = subject.forward(call)
        judge(Results(o.detach().clone(), None if lse is None else lse.detach().clone(), {}), problem, device)
        before = {name: bytes_of(tensor) for name, tensor in call.tensors().items()}
        for name, output in (("o", o), ("lse", lse)):
            if output is None:
                continue
            strides = zip(output.shape, output.stride())
            require(all(size == 1 or stride for size, stride in strides), f"{name} has strides {output.stride()}: elements share memory")
            output.detach().fill_(7.0)
            for other, tensor in call.tensors().items():
                require(torch.equal(bytes_of(tensor), before[other]), f"what is written into {name} changes {other}: they share memory")


@contextlib.contextmanager
def guarded_allocations() -> Iterator[None]:
    """Make torch.empty and its kin return NaN between two margins; raise if a margin was written."""
    guards: list[tuple[Tensor, int, str]] = []
    spots: list[tuple[Any, str]] = [(torch, name) for name in ("empty", "empty_like", "empty_strided")]
    spots += [(Tensor, name) for name in ("new_empty", "new_empty_strided")]
    originals = [getattr(owner, name) for owner, name in spots]
    for (owner, name), original in zip(spots, originals):
        setattr(owner, name, _guarded(original, name, guards))
    try:
        yield
    finally:
        for (owner, name), original in zip(spots, originals):
            setattr(owner, name, original)
    for buffer, extent, name in guards:
        raw = buffer.view(torch.uint8)
        edge = MARGIN * buffer.element_size()
        used = extent * buffer.element_size()
        canary = _canary(buffer.dtype, buffer.device)
        for side, margin in (("before", raw[:edge]), ("behind", raw[edge + used :])):
            require(torch.equal(margin, canary), f"memory {side} a tensor made by {name} ({extent} elements) was written")


def _canary(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bytes of a margin: NaN, which shows who reads it, and between two of them a number, which shows who adds to it."""
    made = torch.full((MARGIN, dtype.itemsize), POISON_BYTE, dtype=torch.uint8, device=device)
    made[1::2] = NUMBER_BYTE
    return made.flatten()


def _guarded(original: Callable[..., Tensor], name: str, guards: list[tuple[Tensor, int, str]]) -> Callable[..., Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        plain = original(*args, **kwargs)
        if plain.layout is not torch.strided or plain.device.type == "meta" or plain.is_complex() or type(plain) is not Tensor:
            return plain
        extent = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride())) if plain.numel() else 0
        buffer = torch.full((extent + 2 * MARGIN,), 0, dtype=plain.dtype, device=plain.device)
        raw, edge = buffer.view(torch.uint8), MARGIN * buffer.element_size()
        raw.fill_(POISON_BYTE)
        raw[:edge] = raw[-edge:] = _canary(plain.dtype, plain.device)
        guards.append((buffer, extent, name))
        guarded = torch.as_strided(buffer, plain.shape, plain.stride(), MARGIN)
        return guarded.requires_grad_(plain.requires_grad)

    return allocate


def poisoned_slack(subject: Subject, problem: Problem, device: torch.device) -> None:
    """NaN around the logical tensors changes no bit of the output, against zeros in the same place."""
    claims = subject.claims_on(device)
    deterministic = "deterministic" in (claims.backward if problem.grads else claims.forward)
    problem = replace(problem, deterministic=deterministic)
    poisoned, clean = make_call(problem, device), make_call(problem, device)
    _clean_slack(clean)
    first, second = subject.run(poisoned), subject.run(clean)
    judge(first, problem, device)
    same_bits(first, second, "with NaN in the slack and with zeros", with_grads=deterministic)


def same_bits(first: Results, second: Results, runs: str, *, with_grads: bool = True) -> None:
    """Raise unless two results are equal bit for bit."""
    pairs = {**first.named(), **({"lse": first.lse} if first.lse is not None else {})}
    others = {**second.named(), **({"lse": second.lse} if second.lse is not None else {})}
    for name, tensor in pairs.items():
        if with_grads or name in ("o", "lse"):
            assert tensor is not None
            other = others[name]
            assert other is not None
            require(torch.equal(bits(tensor), bits(other)), f"{name} differs in its bits between two runs, {runs}")


def _clean_slack(call: Call) -> None:
    with torch.no_grad():
        for name, tensor in call.tensors().items():
            if name.startswith("layout"):  # its tensors have no slack, and may not be written
                continue
            values = tensor.detach().clone()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            raw.set_(tensor.untyped_storage()).zero_()
            target = tensor.detach()
            for dim, stride in enumerate(target.stride()):
                if stride == 0 and target.shape[dim]:
                    target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            target.copy_(values)


def aligned_then_offset(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A kernel specialised on an aligned address must not serve an offset one, nor the reverse."""
    require(problem.offset > 0, "this check takes a problem with an offset")
    aligned = replace(problem, offset=0)
    for order in ((aligned, problem), (problem, aligned), (aligned, problem)):
        for part in order:
            judge(subject.run(make_call(part, device)), part, device)


def huge_strides(subject: Subject, problem: Problem, device: torch.device) -> None:
    """An index times a stride beyond 2^31: right only with 64-bit offsets. The memory between is never touched."""
    require(any(STORAGES[how].far for how in problem.storage), "this check takes a storage with far strides")
    try:
        call = make_call(problem, device)
    except (RuntimeError, MemoryError) as error:
        raise NotApplicable(f"no memory for a tensor of 2^31 elements: {error}") from error
    results = subject.run(call)
    judge(results, replace(problem, storage=("contiguous",) * 3), device)
