"""The README is true: its Python blocks run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_requirements_name_tests_that_exist():
    text = (README.parent / "docs" / "requirements.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(n) for n in range(1, 45)]
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", text)
    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (README.parent / "tests" / file).read_text(), (file, test)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_blocks_run(block, capsys):
    exec(compile(block, str(README), "exec"), {"numel": 100, "flat_gradient": torch.randn(100)})
    if "print(" in block:
        assert "less than dense" in capsys.readouterr().out
