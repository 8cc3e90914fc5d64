"""What can be asked of a backend about a problem: name -> function of (subject, problem, device).

A check raises ConformanceError with its own message; a refusal of the subject passes through it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnzoo.testing.checks import autograd, claims, cuda, dropout, memory, processes, repeat, rows, second, surroundings
from attnzoo.testing.checks.accuracy import accuracy
from attnzoo.testing.checks.rejects import MALFORMED, reject
from attnzoo.testing.outcome import Outcome
from attnzoo.testing.problem import Problem
from attnzoo.testing.relations import RELATIONS
from attnzoo.testing.subject import Subject

__all__ = ["CHECKS"]

Check = Callable[[Subject, Problem, torch.device], Outcome | None]

CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        accuracy,
        claims.all_reasons,
        claims.claim,
        claims.claimed_head_dims,
        claims.declaration,
        claims.rules_reach_the_result,
        claims.unclaimed_device,
        claims.unclaimed_dtype,
        autograd.accumulates,
        autograd.backward_twice,
        autograd.inference_mode,
        autograd.linear_in_gradient,
        autograd.no_grad,
        autograd.shared_inputs,
        autograd.stacked,
        autograd.two_backwards,
        autograd.written_in_between,
        cuda.graph_capture,
        cuda.last_rows,
        cuda.second_device,
        cuda.side_stream,
        cuda.tf32,
        dropout.checkpointed,
        dropout.draws_nothing_at_zero,
        dropout.draws_nothing_with_seed,
        dropout.kept_elements,
        dropout.seed_from_generator,
        dropout.seed_of_either_type,
        memory.aligned_then_offset,
        memory.huge_strides,
        memory.outputs_are_own,
        memory.poisoned_allocations,
        memory.poisoned_free_blocks,
        memory.poisoned_slack,
        processes.cold_caches,
        processes.named_without_gpu,
        processes.without_triton,
        repeat.a_b_a,
        repeat.changed_in_place,
        repeat.equal_bits,
        repeat.threads,
        rows.mean_of_values,
        rows.row_deleted,
        rows.row_outside_loss,
        second.double_backward,
        surroundings.autocast,
        surroundings.compiled,
        surroundings.compiled_for_other_memory,
        surroundings.compiled_for_other_sizes,
        surroundings.function_transforms,
        surroundings.vmapped,
    )
}
"""Name -> check."""

CHECKS |= RELATIONS
CHECKS |= {f"reject {name}": reject(name) for name in MALFORMED}
