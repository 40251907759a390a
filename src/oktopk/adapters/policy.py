# SPDX-License-Identifier: Apache-2.0
"""Which parameters travel dense: rules by shape, size and name."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which parameters travel dense. By default biases, norms and tiny tensors do.

    They are a fraction of a percent of a model, and much depends on them. Pass a policy to `attach`
    or `local_steps` as `policy=`.
    """

    vectors: bool = True
    """Parameters with fewer than two dimensions (biases, norms) travel dense."""

    below: int = 2048
    """Parameters with fewer elements than this travel dense."""

    patterns: tuple[str, ...] = ()
    """Parameters whose name matches one of these shell patterns travel dense."""

    sparse_patterns: tuple[str, ...] = ()
    """Parameters whose name matches one of these are sparse whatever the other rules say."""

    def is_dense(self, name: str, parameter: Tensor) -> bool:
        """Whether a parameter travels dense under these rules."""
        if any(fnmatchcase(name, pattern) for pattern in self.sparse_patterns):
            return False
        small = parameter.numel() < self.below or (self.vectors and parameter.ndim < 2)
        return small or any(fnmatchcase(name, pattern) for pattern in self.patterns)
