"""What a backend claims must be served, what it doesn't claim must be refused, and it must say so properly."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnzoo.backend import Capabilities
from attnzoo.testing.checks.accuracy import accuracy
from attnzoo.testing.failure import ConformanceError, NotApplicable, require
from attnzoo.testing.inputs import make_call
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import DTYPES, Blocks, Problem, Segments, Sinks, Table
from attnzoo.testing.subject import Refused, Subject

__all__ = ["all_reasons", "claim", "claimed_head_dims", "declaration", "rules_reach_the_result", "unclaimed_device", "unclaimed_dtype"]

TILE = 128  # the largest that kernels commonly want whole
LARGEST_DIM = 512  # a claim beyond this is taken as "any"

RULES: dict[str, dict[str, object]] = {
    "causal": {"causal": True},
    "window": {"window": (2, 2)},
    "mask": {"mask": Table("checker")},
    "bias": {"bias": Table("random")},
    "segments": {"segments": Segments("interleaved")},
    "layout": {"layout": Blocks("diagonal", (16, 16))},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": Sinks("large")},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
}
"""Rule -> what asks for it."""


def claim(subject: Subject, problem: Problem, device: torch.device) -> Outcome | None:
    """The smallest call that needs a feature, or one of whole tiles: served and right, or refused with UnsupportedError."""
    unclaimed = _unclaimed(subject.claims_on(device), problem)
    try:
        accuracy(subject, problem, device)
    except Refused as refusal:
        if unclaimed:
            return Outcome("refused", refusal.reasons)
        _must_serve(subject, in_whole_tiles(problem), device, refusal.reasons)
    if unclaimed:
        raise ConformanceError(f"{subject.name} doesn't claim {', '.join(unclaimed)}, but served it: claim it or refuse it")
    return None


def in_whole_tiles(problem: Problem) -> Problem:
    """The same problem, so long that lengths, or the blocks of its layout, are whole tiles of 128."""
    layout = problem.layout
    times = TILE // (problem.q_len if layout is None else layout.block[0])
    if layout is not None:
        layout = replace(layout, block=(layout.block[0] * times, layout.block[1] * times))
    return replace(problem, q_len=problem.q_len * times, kv_len=problem.k_len * times, layout=layout)


def _must_serve(subject: Subject, problem: Problem, device: torch.device, reasons: tuple[str, ...]) -> None:
    """Raise ConformanceError if this is refused as well; reasons: against the smaller problem."""
    try:
        accuracy(subject, problem, device)
    except Refused as refusal:
        also = [f"{reason}, in whole tiles too" for reason in refusal.reasons if reason not in reasons]
        said = f"{subject.name} claims all of {problem.features}, but refuses: {'; '.join([*reasons, *also])}"
        raise ConformanceError(said) from refusal


def _unclaimed(claims: Capabilities, problem: Problem) -> list[str]:
    """What the problem needs beyond the claims: features, or gradients at all."""
    if problem.grads and not claims.gradients:
        return ["gradients", *[feature for feature in problem.features if feature not in claims.forward]]
    served = claims.backward if problem.grads else claims.forward
    return [feature for feature in problem.features if feature not in served]


def claimed_head_dims(subject: Subject, problem: Problem, device: torch.device) -> Outcome | None:
    """The smallest and the largest claimed head dim run, forward and backward; the next one on either side is refused, and so is
    one between multiples."""
    claims = subject.claims_on(device)
    smallest, largest = claims.head_dims
    if not claims.gradients:
        problem = replace(problem, grads=())
    for dim in {smallest, min(largest, LARGEST_DIM)}:
        part = replace(problem, head_dim=dim)
        try:
            accuracy(subject, part, device)
        except Refused as refusal:
            raise ConformanceError(f"{subject.name} claims head dim {dim}, but refuses it: {'; '.join(refusal.reasons)}") from refusal
    between = [smallest + 1] if claims.head_dim_multiple > 1 else []
    beyond = [dim for dim in (smallest - 1, *between, largest + 1) if 0 < dim <= LARGEST_DIM]
    for dim in beyond:
        _must_refuse(subject, replace(problem, head_dim=dim), device, f"head dim {dim}")
    return None if claims.gradients else Outcome("forward only", ("no gradients are claimed",))


def unclaimed_dtype(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A dtype that is not claimed is refused."""
    for dtype in DTYPES:
        if getattr(torch, dtype) not in subject.claims_on(device).dtypes:
            _must_refuse(subject, replace(problem, dtype=dtype), device, dtype)


def unclaimed_device(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Tensors on a device that is not claimed are refused, before a kernel sees them."""
    devices = subject.capabilities.devices
    elsewhere = [name for name in ("cpu", "meta") if devices and name not in devices]
    if not elsewhere:
        raise NotApplicable("the backend claims every device")
    for name in elsewhere:
        _must_refuse(subject, problem, torch.device(name), f"tensors on {name}")


def _must_refuse(subject: Subject, problem: Problem, device: torch.device, what: str) -> None:
    call = make_call(problem, device)
    try:
        subject(call.q, call.k, call.v, **call.options)
    except Refused:
        return
    raise ConformanceError(f"{subject.name} doesn't claim {what}, but served it: claim it or refuse it")


def all_reasons(subject: Subject, problem: Problem, device: torch.device) -> None:
    """A refusal lists every reason, not the first one alone: at least one for each unclaimed feature of the call."""
    unclaimed = _unclaimed(subject.claims_on(device), problem)
    reasons = subject.reasons(make_call(problem, device))
    require(
        len(reasons) >= len(unclaimed), f"{len(unclaimed)} features are not claimed ({', '.join(unclaimed)}), but the reasons are {reasons}"
    )
    require(all(reason.strip() for reason in reasons), f"an empty reason among {reasons}")


def declaration(subject: Subject, problem: Problem, device: torch.device) -> None:
    """What a backend says of itself: name, version, capabilities; reasons are pure and read no tensor."""
    backend = subject.backend
    is_word = isinstance(backend.name, str) and backend.name != "" and not set(" ,:=").intersection(backend.name)
    require(is_word, f"name is {backend.name!r}; it takes a word, without blank, comma, colon or equals sign")
    require(backend.api_version == 1, f"api_version is {backend.api_version!r}; this attnzoo takes 1")
    require(bool(subject.capabilities.dtypes), "no dtype is claimed")
    only_backward = subject.capabilities.backward - subject.capabilities.forward - {"bias_grad", "double_backward"}
    require(not only_backward, f"claimed with a gradient, but not without: {', '.join(sorted(only_backward))}")
    hash(subject.capabilities)
    for kind in sorted(subject.capabilities.devices or {device.type}):
        _check_part(subject.backend.capabilities_on(kind), subject.capabilities, kind)
    spec = subject.spec(make_call(problem, device))
    first, second = backend.unsupported_reasons(spec), backend.unsupported_reasons(spec)
    require(
        isinstance(first, list) and all(isinstance(reason, str) for reason in first), f"unsupported_reasons gave {first!r}, not a list[str]"
    )
    require(first == second, f"unsupported_reasons gave {first} and then {second} for one spec")
    elsewhere = replace(spec, device=torch.device("cuda:7"))
    require(isinstance(backend.unsupported_reasons(elsewhere), list), "unsupported_reasons failed for a device that this machine lacks")


def _check_part(part: Capabilities, whole: Capabilities, device: str) -> None:
    """What is claimed on one device is part of what is claimed at all."""
    for name in ("dtypes", "forward", "backward"):
        beyond = getattr(part, name) - getattr(whole, name)
        require(not beyond, f"{name}: claimed on {device}, but not in capabilities: {', '.join(sorted(map(str, beyond)))}")
    require(whole.gradients or not part.gradients, f"gradients are claimed on {device}, but not in capabilities")
    for name in ("head_dim_multiple", "block_multiple"):
        of_part, of_whole = getattr(part, name), getattr(whole, name)
        require(of_part % of_whole == 0, f"{name} on {device} is {of_part}, no multiple of that of capabilities, {of_whole}")
    dims = whole.head_dims[0] <= part.head_dims[0] and part.head_dims[1] <= whole.head_dims[1]
    require(dims, f"head_dims on {device} are {part.head_dims}, beyond those of capabilities, {whole.head_dims}")


def rules_reach_the_result(subject: Subject, problem: Problem, device: torch.device) -> None:
    """Nothing is dropped: each rule, where it is served, changes the result of a call that leaves it out."""
    plain, _ = subject.forward(make_call(replace(problem, grads=()), device))
    for name, rule in RULES.items():
        try:
            other, _ = subject.forward(make_call(replace(problem, grads=(), **rule), device))  # type: ignore[arg-type]
        except Refused:
            continue
        require(not torch.equal(plain, other), f"{name} changes nothing")
