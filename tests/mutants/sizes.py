"""Faults of lengths, head dims, empty sizes and grids."""

from __future__ import annotations

from dataclasses import replace

import torch

from .mutant import PLAIN_FORWARD, Mutant


class TailKeysSkipped(Mutant):
    """Keys beyond the last whole tile of 16 are left out."""

    caught_by = ("T10-length-17-full-fp32", "T10-lengths-16x17-fp16", "T14-relation-permutation_of_keys-fp32")

    def band(self, spec, inputs):
        return super().band(spec, inputs) & (torch.arange(spec.kv_len) < spec.kv_len // 16 * 16)


class TailQueriesSkipped(Mutant):
    """Queries beyond the last whole tile of 16 are left at 0."""

    caught_by = ("T10-length-17-full-fp32", "T10-lengths-17x16-fp16")

    def output(self, spec, weights, values):
        o = super().output(spec, weights, values)
        o[:, :, spec.q_len // 16 * 16 :] = 0
        return o


class TailKeysUnmasked(Mutant):
    """The keys that pad the last tile of 16 have score 0 and take part in the sum."""

    caught_by = ("T10-length-17-full-fp32", "T10-short-15", "T14-relation-value_is_linear-fp32")

    def softmax(self, spec, inputs, scores):
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % 16))
        p, lse = super().softmax(spec, inputs, padded)
        return p[..., : spec.kv_len], lse


class HeadDimCut(Mutant):
    """Only the first 64 channels of q and k count."""

    caught_by = ("T11-head-dim-72-fp32", "T11-head-dim-128-fp16")

    def products(self, spec, inputs):
        return self.queries(spec, inputs)[..., :64] @ self.keys(spec, inputs)[..., :64].mT


class HeadDimOfEightsCut(Mutant):
    """Head dims between the usual ones, 48, 56, 88 and 120, lose their last 8 channels."""

    caught_by = ("T11-head-dim-48-fp32", "T11-head-dim-56-bf16", "T11-head-dim-88-fp16", "T11-head-dim-120-fp32")
    passes = "T11-head-dim-104-fp32"

    def products(self, spec, inputs):
        counted = spec.head_dim - 8 if spec.head_dim in (48, 56, 88, 120) else spec.head_dim
        return self.queries(spec, inputs)[..., :counted] @ self.keys(spec, inputs)[..., :counted].mT


class HeadDimPadded(Mutant):
    """The default scale is that of the head dim padded to a multiple of 16."""

    caught_by = ("T11-head-dim-40-fp32", "T11-head-dim-8-fp16")

    def misread(self, spec, inputs):
        is_default = spec.head_dim and spec.scale == spec.head_dim**-0.5
        return replace(spec, scale=(-(-spec.head_dim // 16) * 16) ** -0.5) if is_default else spec, inputs


class ValueDimOfQuery(Mutant):
    """o has the head dim of q."""

    caught_by = ("T32-claim-value_dim-forward", "T11-value-dim-64-32-fp32")

    def output(self, spec, weights, values):
        o = super().output(spec, weights, values)
        return torch.nn.functional.pad(o, (0, spec.head_dim - spec.value_dim))


class ValueDimOfQueryInBackward(Mutant):
    """The backward reads as many channels of v and dO as q has."""

    caught_by = ("T11-value-dim-32-64-fp32",)

    def misread_backward(self, spec, inputs):
        v = inputs.v.clone()
        v[..., spec.head_dim :] = 0
        return spec, replace(inputs, v=v)


class NoKeysIsNaN(Mutant):
    """Skv = 0 gives NaN, as 0 / 0."""

    caught_by = ("T07-no-keys-full-fp32", "T32-claim-empty-forward")

    def output(self, spec, weights, values):
        o = super().output(spec, weights, values)
        return o if spec.kv_len else o * torch.nan


class NoKeysHasLseOfZero(Mutant):
    """Skv = 0 gives an lse of 0."""

    caught_by = ("T07-no-keys-full-fp32",)

    def softmax(self, spec, inputs, scores):
        p, lse = super().softmax(spec, inputs, scores)
        return p, lse if spec.kv_len else torch.zeros_like(lse)


class GridOverflow(Mutant):
    """Heads beyond 65535, counted over the batch, are not computed."""

    caught_by = ("T12-grid-batch-65536",)
    passes = PLAIN_FORWARD

    def output(self, spec, weights, values):
        o = super().output(spec, weights, values)
        o.flatten(0, 1)[65535:] = 0
        return o
