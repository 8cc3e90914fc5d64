"""What the kit does on a side stream has ended before its tensors go, also where the backend refuses the call.

Memory of one stream that another is still to write goes to whoever allocates next: on an H200 the refusal of one case wrote over the
tensors of the next. No GPU here: streams are stand-ins that note the order of things.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from attnzoo.errors import UnsupportedError
from attnzoo.testing.checks import cuda
from attnzoo.testing.problem import Problem
from attnzoo.testing.subject import Subject

CPU = torch.device("cpu")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened on the streams, in order."""
    noted: list[str] = []

    class Stream:
        def __init__(self, *_: Any) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            noted.append("waits for a stream")

        def synchronize(self) -> None:
            noted.append("host waits")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: noted.append("host waits"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: noted.append("slow work"))
    return noted


class Refusing(Subject):
    def run(self, call: Any) -> Any:
        raise UnsupportedError({"naive": ("a reason",)})


@pytest.mark.parametrize("check", [cuda.side_stream, cuda.graph_capture])
def test_a_refusal_leaves_nothing_under_way(events, check):
    with pytest.raises(UnsupportedError):
        check(Refusing("naive"), Problem(), CPU)
    assert events[-1] == "host waits", events


def test_the_side_stream_waits_for_its_inputs_and_is_waited_for(events):
    cuda.side_stream(Subject("naive"), Problem(), CPU)
    assert events == ["waits for a stream", "slow work", "host waits"]
