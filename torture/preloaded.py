# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that all processes are forked from: each alone would need seconds."""

import oktopk.cli
import torture.inputs  # noqa: F401
from torture.ranks import warm_kernels

oktopk.cli.parser([])
warm_kernels()
