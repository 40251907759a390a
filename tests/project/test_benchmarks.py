# SPDX-License-Identifier: Apache-2.0
"""The scripts of `benchmarks` take too long for tests; what they import must exist all the same."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from commands import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_benchmark_can_be_loaded(script: Path, monkeypatch: pytest.MonkeyPatch):
    """Everything that a script imports and defines, without its `main`."""
    monkeypatch.syspath_prepend(str(script.parent))
    assert runpy.run_path(str(script), run_name="loaded")["__doc__"]
