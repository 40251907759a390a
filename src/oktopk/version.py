# SPDX-License-Identifier: Apache-2.0
"""The version, apart, so that building a package need not import torch."""

__version__ = "0.1.0"
