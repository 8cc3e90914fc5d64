"""The backends named by --attn-backend, each held to the whole contract."""

from __future__ import annotations

import pytest

from attnzoo.testing.suite import BackendConformance


class TestBackend(BackendConformance):
    @pytest.fixture
    def backend(self, attn_backend: str) -> str:
        return attn_backend
