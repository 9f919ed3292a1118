"""torch's own test classes set up what some of them do not tear down: here it ends with the test."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch


@pytest.fixture(autouse=True)
def as_torchs_classes_found_it() -> Iterator[None]:
    """The environment, and the checks of sparse tensors."""
    with mock.patch.dict(os.environ), torch.sparse.check_sparse_tensor_invariants(enable=False):
        yield
