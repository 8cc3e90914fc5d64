"""The built-in backends that run anywhere, each held to the whole contract."""

from __future__ import annotations

import pytest

from attnzoo.testing.suite import BackendConformance


class TestNaive(BackendConformance):
    @pytest.fixture
    def backend(self) -> str:
        return "naive"


class TestTiled(BackendConformance):
    @pytest.fixture
    def backend(self) -> str:
        return "tiled"
