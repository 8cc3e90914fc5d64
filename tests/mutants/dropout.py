"""Faults of dropout."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from attnzoo.dropout import dropout_keep

from .mutant import Mutant


class DropoutRedrawn(Mutant):
    """The backward draws its own elements."""

    caught_by = ("T22-dropout-plain-fp32", "T24-backward-parity-dropout-fp16")
    passes = "T22-kept-elements-p0.5-30x30-seed1"

    def misread(self, spec, inputs):
        return spec, inputs

    def misread_backward(self, spec, inputs):
        return spec, inputs if inputs.dropout_seed is None else replace(inputs, dropout_seed=inputs.dropout_seed + 1)


class DropoutUnscaled(Mutant):
    """Kept elements are not divided by 1 - p."""

    caught_by = ("T22-dropout-plain-fp32", "T22-kept-elements-p0.5-30x30-seed1")

    def dropout(self, spec, inputs):
        return super().dropout(spec, inputs) * (1.0 - spec.dropout_p)


class DropoutUnscaledInBackward(Mutant):
    """The backward does not divide by 1 - p."""

    caught_by = ("T22-dropout-plain-fp32", "T22-p-0.9")
    passes = "T22-kept-elements-p0.5-30x30-seed1"

    def backward(self, spec, inputs, *rest):
        return super().backward(spec, inputs, *rest)

    def sum_over_group(self, spec, tensor):
        return super().sum_over_group(spec, tensor) * (1.0 - spec.dropout_p)


class DropoutInverted(Mutant):
    """p is the probability that an element is kept."""

    caught_by = ("T22-p-0.1", "T22-kept-elements-p0.1-65x64-seed1099511627781")

    def misread(self, spec, inputs):
        return replace(spec, dropout_p=1 - spec.dropout_p if spec.dropout_p else 0.0), inputs


class DropoutBeforeNormalisation(Mutant):
    """Elements are dropped before the sum of the row is taken."""

    caught_by = ("T22-dropout-plain-fp32",)

    def output(self, spec, weights, values):
        share = weights.sum(-1, keepdim=True) if spec.dropout_p else weights.new_ones(())
        return super().output(spec, weights / share.masked_fill(share == 0, 1.0), values)


class CounterOfKvHead(Mutant):
    """The counter takes the kv head, so that a group shares its elements."""

    caught_by = ("T22-dropout-grouped-fp32", "T19-heads-6-2-with-dropout-bf16")
    passes = "T22-dropout-plain-fp32"

    def kept_by_dropout(self, spec, seed):
        ranges = range(spec.batch), range(spec.kv_heads), range(spec.q_len), range(spec.kv_len)
        return dropout_keep(seed, spec.dropout_p, *ranges).repeat_interleave(spec.group, 1)


class CounterOfFirstBatch(Mutant):
    """The counter leaves out the batch entry."""

    caught_by = ("T22-dropout-batch-and-heads-fp32",)

    def kept_by_dropout(self, spec, seed):
        return super().kept_by_dropout(spec, seed)[:1]


class CounterWithinTile(Mutant):
    """The counter begins anew with every tile of 64 keys."""

    caught_by = ("T22-dropout-long-fp32", "T22-kept-elements-p0.9-17x129-seed3")
    passes = "T22-dropout-plain-fp32"

    def kept_by_dropout(self, spec, seed):
        return super().kept_by_dropout(spec, seed)[..., torch.arange(spec.kv_len) % 64]


class DropoutLostUnderWindow(Mutant):
    """With a window, nothing is dropped."""

    caught_by = ("T18-pair-window-dropout-fp32",)
    passes = "T22-dropout-causal-fp32"

    def dropout(self, spec, inputs):
        return 1.0 if spec.window is not None else super().dropout(spec, inputs)


class SeedIn32Bits(Mutant):
    """Only the low word of the seed counts."""

    caught_by = ("T22-seed-4294967296", "T22-seed--1")
    passes = "T22-seed-4294967295"

    def kept_by_dropout(self, spec, seed):
        return super().kept_by_dropout(spec, seed & 0xFFFFFFFF)


class SeedIgnored(Mutant):
    """Every call drops the elements of seed 0."""

    caught_by = ("T22-seed_from_generator-fp32", "T22-seed-1")
    passes = "T22-seed-0"

    def kept_by_dropout(self, spec, seed):
        return super().kept_by_dropout(spec, torch.zeros_like(seed))


class NoDropoutAdvancesGenerator(Mutant):
    """A call without dropout draws a seed all the same."""

    caught_by = ("T22-draws_nothing_at_zero-fp32",)
    passes = None

    def misread(self, spec, inputs):
        torch.randint(2**31, (1,))
        return spec, inputs


class GivenSeedAdvancesGenerator(Mutant):
    """A seed is drawn, and then the one that was given is taken."""

    caught_by = ("T22-draws_nothing_with_seed-fp32",)

    def misread(self, spec, inputs):
        if spec.dropout_p:
            torch.randint(2**31, (1,))
        return spec, inputs


class SeedCountsCalls(Mutant):
    """Every forward takes the next seed, so that one that is computed again drops other elements."""

    caught_by = ("T22-checkpointed-fp32", "T22-checkpointed-fp16")

    def __init__(self):
        super().__init__()
        self.calls = itertools.count()

    def attend(self, spec, inputs):
        seed = inputs.dropout_seed
        return super().attend(spec, inputs if seed is None else replace(inputs, dropout_seed=seed + next(self.calls)))
