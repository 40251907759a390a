# SPDX-License-Identifier: Apache-2.0
"""The fixture of tests/kernels: every backend, one after the other."""

import pytest

from kernel_cases import reference
from oktopk import kernels


@pytest.fixture(scope="module", params=["reference", *kernels.BACKENDS])
def backend(request):
    """A module of kernels."""
    if request.param == "reference":
        return reference
    package, load = kernels.BACKENDS[request.param]
    pytest.importorskip(package, reason=f"the {request.param} kernels need {package}")
    return load()
