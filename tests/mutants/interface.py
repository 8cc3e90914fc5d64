"""Faults of what a backend claims, refuses and returns."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from attnzoo.errors import UnsupportedError

from .mutant import PLAIN_FORWARD, TWO_GPUS, Mutant
from .reference import Reference

CAPABILITIES = Reference.capabilities


class ServesWhatItDoesNotClaim(Mutant):
    """softcap is not claimed, and not refused."""

    caught_by = ("T32-claim-softcap-forward", "T32-claim-softcap-backward", "T32-all-reasons-forward")
    capabilities = replace(CAPABILITIES, forward=CAPABILITIES.forward - {"softcap"}, backward=CAPABILITIES.backward - {"softcap"})

    def unsupported_reasons(self, spec):
        return []


class ClaimsWhatItDropsInBackward(Mutant):
    """Sinks are claimed with a gradient, which is zero."""

    caught_by = ("T32-claim-sinks-backward",)
    passes = "T32-claim-sinks-forward"

    def sink_gradient(self, inputs, lse, delta):
        return torch.zeros_like(super().sink_gradient(inputs, lse, delta))


class WrongWhereOnlyForward(Mutant):
    """Claims nothing with a gradient, and drops causal and mask where there are more than 40 keys."""

    caught_by = ("T06-causal-square-64-fp32", "T17-mask-sparse-fp32")
    passes = "T32-claim-mask-forward"
    capabilities = replace(CAPABILITIES, backward=frozenset())

    def misread(self, spec, inputs):
        if spec.kv_len <= 40:
            return spec, inputs
        return replace(spec, causal=False, mask=None), replace(inputs, mask=None)


class RefusesWhatItClaims(Mutant):
    """A window is claimed, and refused."""

    caught_by = ("T32-claim-window-forward",)

    def unsupported_reasons(self, spec):
        return ["window is not supported"] if spec.window else []


class RefusesInAttend(Mutant):
    """unsupported_reasons accepts sinks, attend refuses them."""

    caught_by = ("T32-claim-sinks-forward", "T03-sinks-large-fp32")

    def attend(self, spec, inputs):
        if inputs.sinks is not None:
            raise UnsupportedError({self.name: ["sinks are not supported"]})
        return super().attend(spec, inputs)


class RefusesWithoutReason(Mutant):
    """Segments together with causal are refused with an empty reason."""

    caught_by = ("T18-causal-segments-fp32",)

    def unsupported_reasons(self, spec):
        return [""] if spec.causal and spec.segments else []


class RefusesPlainCall(Mutant):
    """fp16 is claimed, and every call in it refused."""

    caught_by = ("T32-plain-forward-fp16",)

    def unsupported_reasons(self, spec):
        return ["float16 is slow here"] if spec.dtype == torch.float16 else []


class ReasonsAreABool(Mutant):
    """unsupported_reasons returns True where it means that the call is fine."""

    caught_by = (PLAIN_FORWARD,)
    passes = None

    def unsupported_reasons(self, spec):
        return True


class OutputInFloat32(Mutant):
    """o stays in fp32."""

    caught_by = ("T32-plain-forward-fp16", "T32-plain-forward-bf16")

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return o.to(spec.accumulator_dtype), lse


class OutputIsATuple(Mutant):
    """The lse comes back though nobody asked for it, inside of o."""

    caught_by = (PLAIN_FORWARD,)
    passes = None

    def attend(self, spec, inputs):
        o, lse = super().attend(replace(spec, return_lse=True), inputs)
        return (o, lse), lse


class DeviceNotSet(Mutant):
    """o is allocated on the current device, not on that of q."""

    caught_by = ("T28-second-device-plain",)
    needs = TWO_GPUS

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return o.to(spec.device.type), lse


class OutputRequiresGradient(Mutant):
    """o requires a gradient though no input does."""

    caught_by = ("T32-plain-forward-fp32",)

    def attend(self, spec, inputs):
        o, lse = super().attend(spec, inputs)
        return (o if spec.grads or not torch.is_grad_enabled() else o.detach().requires_grad_()), lse


class SinksAdvanceGenerator(Mutant):
    """A call with sinks draws a number that nobody needs."""

    caught_by = ("T32-claim-sinks-forward", "T03-sinks-large-fp32")

    def sinks(self, spec, inputs):
        if inputs.sinks is not None:
            torch.rand(1)
        return super().sinks(spec, inputs)


class ServesAnyHeadDim(Mutant):
    """Head dims up to 64 are claimed, and wider ones served as well."""

    caught_by = ("T11-claimed-head-dims",)
    capabilities = replace(CAPABILITIES, head_dims=(1, 64))

    def unsupported_reasons(self, spec):
        return []


class ServesAnyDType(Mutant):
    """float64 is not claimed, and not refused."""

    caught_by = ("T32-unclaimed-dtype",)
    capabilities = replace(CAPABILITIES, dtypes=CAPABILITIES.dtypes - {torch.float64})

    def unsupported_reasons(self, spec):
        return []


class NameOfTwoWords(Mutant):
    """The name holds a blank."""

    caught_by = ("T31-declaration",)

    def __init__(self):
        super().__init__()
        self.name = "two words"


class InferenceForgetsCausal(Mutant):
    """A faster path for inference_mode leaves out causal."""

    caught_by = ("T15-inference_mode-causal",)
    passes = "T15-no_grad-causal"

    def misread(self, spec, inputs):
        return replace(spec, causal=spec.causal and not torch.is_inference_mode_enabled()), inputs


class NoOtherThreads(Mutant):
    """What a first call prepared is known to its own thread alone."""

    caught_by = ("T29-threads-plain", "T29-threads-layout")

    def __init__(self):
        super().__init__()
        self.prepared = threading.local()
        self.prepared.is_done = True

    def forward(self, spec, inputs):
        assert self.prepared.is_done
        return super().forward(spec, inputs)
