"""flash on a GPU through the whole conformance kit, held to each kind of its kernels.

`pytest --pyargs attnzoo.conformance --attn-backend flash` judges what users get, where small calls stay off the Hopper kernels.
"""

from __future__ import annotations

import pytest
import torch

from attnzoo.backends.flash import Flash
from attnzoo.testing import BackendConformance

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a CUDA device of capability 8.0 or later", allow_module_level=True)


class TestPortable(BackendConformance):
    @pytest.fixture
    def backend(self) -> Flash:
        return Flash(is_interpreted=False, kernels="portable")


class TestHopper(BackendConformance):
    @pytest.fixture
    def backend(self) -> Flash:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs compute capability 9.0")
        return Flash(is_interpreted=False, kernels="hopper")
