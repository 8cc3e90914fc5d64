"""Faults of the log-sum-exp and of sinks."""

from __future__ import annotations

from dataclasses import replace

import torch

from .gradients import GradientMutant
from .mutant import PLAIN_FORWARD, Mutant


class LseMutant(Mutant, abstract=True):
    """Returns another lse than it keeps for the backward."""

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return o, None if lse is None else self.returned(spec, inputs, lse)

    def returned(self, spec, inputs, lse):
        return lse


class LseInLog2(LseMutant):
    """The lse is a logarithm to base 2."""

    caught_by = ("T32-claim-lse-forward", "T21-lse-forward-plain-fp16", "T21-relation-merge-plain-fp32")

    def returned(self, spec, inputs, lse):
        return lse * 1.4426950408889634


class LseOfUnmaskedRow(LseMutant):
    """A row with no key has lse +inf."""

    caught_by = ("T01-bool-fp32", "T21-lse-mask-loss-o+lse-fp32")

    def returned(self, spec, inputs, lse):
        return lse.masked_fill(lse == -torch.inf, torch.inf)


class LseWithoutSinks(LseMutant):
    """The lse leaves out the sinks."""

    caught_by = ("T21-lse-forward-sinks-fp32", "T03-sinks-large-fp32")

    def returned(self, spec, inputs, lse):
        if inputs.sinks is None:
            return lse
        spec, inputs = replace(spec, sinks_dtype=None), replace(inputs, sinks=None)
        return self.softmax(spec, inputs, self.scores(spec, inputs)[0])[1]


class LseAfterDropout(LseMutant):
    """The lse counts the elements that dropout kept."""

    caught_by = ("T21-lse-dropout-loss-o+lse-fp32", "T22-dropout-lse-fp32")

    def returned(self, spec, inputs, lse):
        if not spec.dropout_p:
            return lse
        p, _ = self.softmax(spec, inputs, self.scores(spec, inputs)[0])
        return lse + (p * self.dropout(spec, inputs)).sum(-1).log()


class LseInHalf(LseMutant):
    """The lse has the dtype of q."""

    caught_by = ("T21-lse-forward-plain-fp16",)
    passes = "T21-lse-forward-plain-fp32"

    def returned(self, spec, inputs, lse):
        return lse.to(spec.dtype)


class LseForgottenWithoutGradient(LseMutant):
    """Without a gradient no lse is kept, nor returned."""

    caught_by = ("T21-lse-forward-plain-fp32", "T32-claim-lse-forward")
    passes = "T32-claim-lse-backward"

    def returned(self, spec, inputs, lse):
        return lse if spec.grads else None


class LseDetached(LseMutant):
    """The lse carries no gradient."""

    caught_by = ("T21-lse-plain-loss-lse-fp32", "T32-claim-lse-backward")
    passes = "T32-claim-lse-forward"

    def returned(self, spec, inputs, lse):
        return lse.detach()


class LseGradientDropped(Mutant):
    """The gradient of the lse is thrown away."""

    caught_by = ("T21-lse-plain-loss-o+lse-fp32", "T21-lse-plain-loss-lse-fp16")
    passes = "T21-lse-unread-plain"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        return super().backward(spec, inputs, o, lse, grad_o, None)


class SinksIgnored(Mutant):
    """sinks have no effect."""

    caught_by = ("T32-claim-sinks-forward", "T03-sinks-large-fp32")

    def sinks(self, spec, inputs):
        return torch.full_like(super().sinks(spec, inputs), -torch.inf)


class SinkNotInMaximum(Mutant):
    """The maximum of a row leaves out its sink, which then overflows."""

    caught_by = ("T03-sinks-far_above-fp32",)
    passes = "T32-claim-sinks-backward"

    def pivot(self, spec, scores, sinks):
        return super().pivot(spec, scores, torch.full_like(sinks, -torch.inf))


class SinkGradientSign(Mutant):
    """The gradient of the sinks has the wrong sign."""

    caught_by = ("T32-claim-sinks-backward", "T24-backward-parity-sinks-fp32")
    passes = "T32-claim-sinks-forward"

    def sink_gradient(self, inputs, lse, delta):
        return -super().sink_gradient(inputs, lse, delta)


class SinkGradientOfFirstBatch(Mutant):
    """The gradient of the sinks is not summed over the batch."""

    caught_by = ("T24-backward-parity-sinks-fp32", "T03-sinks-uncancelled-random-of-fp32-bf16")
    passes = PLAIN_FORWARD

    def sink_gradient(self, inputs, lse, delta):
        return super().sink_gradient(inputs, lse[:1], delta[:1])


class SinkGradientOfEmptyRow(Mutant):
    """A sink gets nothing from the lse of a row with no key."""

    caught_by = ("T01-sinks-fp32", "T07-no-keys-or-queries-with-sinks")
    passes = "T24-backward-parity-sinks-fp32"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        empty = ~self.kept(spec, inputs).expand(*lse.shape, spec.kv_len).any(-1)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(empty, 0.0)
        return super().backward(spec, inputs, o, lse, grad_o, grad_lse)


class LseGradientLostUnderWindow(Mutant):
    """With a window, the gradient of the lse is thrown away."""

    caught_by = ("T21-lse-window-loss-lse-fp32", "T21-lse-window-loss-o+lse-fp16")
    passes = "T21-lse-causal-loss-lse-fp32"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        return super().backward(spec, inputs, o, lse, grad_o, None if spec.window is not None else grad_lse)


class SinkGradientDoubledWithLse(GradientMutant):
    """With causal and an lse that the loss reads, the gradient of the sinks is twice what it is."""

    caught_by = ("T24-backward-parity-sinks-causal-lse-fp32", "T21-lse-sinks-causal-loss-o+lse-fp32")
    passes = "T21-lse-sinks-loss-o+lse-fp32"

    def spoil(self, spec, inputs, grads):
        return replace(grads, sinks=grads.sinks * 2) if grads.sinks is not None and spec.causal and spec.return_lse else grads


class SinksLostUnderSegments(Mutant):
    """With segments, sinks have no effect."""

    caught_by = ("T18-pair-segments-sinks-fp32",)
    passes = "T24-backward-parity-sinks-fp32"

    def sinks(self, spec, inputs):
        sinks = super().sinks(spec, inputs)
        return sinks if inputs.q_segment_ids is None else torch.full_like(sinks, -torch.inf)


class StridesOfLseGradientIgnored(Mutant):
    """The gradient of the lse is read as if it were contiguous; that of lse.sum() is one number, expanded."""

    caught_by = ("T21-lse-gradient-sum-fp32", "T21-lse-gradient-bshd-bf16", "T21-lse-gradient-step-fp32")
    passes = "T21-lse-plain-loss-o+lse-fp32"

    def backward(self, spec, inputs, o, lse, grad_o, grad_lse):
        if grad_lse is not None:
            memory = torch.empty(0, dtype=grad_lse.dtype).set_(grad_lse.untyped_storage())[grad_lse.storage_offset() :]
            memory = memory[: lse.numel()]
            grad_lse = torch.nn.functional.pad(memory, (0, lse.numel() - memory.numel())).view_as(lse)
        return super().backward(spec, inputs, o, lse, grad_o, grad_lse)


class SinksInHalf(Mutant):
    """Sinks are rounded to the dtype of q."""

    caught_by = ("T03-sinks-uncancelled-above-of-fp32-fp16", "T03-sinks-uncancelled-above-of-fp32-bf16")
    passes = "T03-sinks-large-fp16"

    def sinks(self, spec, inputs):
        logits = super().sinks(spec, inputs)
        return logits.to(spec.dtype).to(logits.dtype)
