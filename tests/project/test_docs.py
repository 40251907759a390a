# SPDX-License-Identifier: Apache-2.0
"""The README and the documentation are true: their code runs, and the site builds.

The rule for blocks of code, page by page and from top to bottom (pages.py, commands.py):

- `python` runs; the blocks of a page share their names. In README.md `numel` and `flat_gradient`
  are given, for a block without a context of its own.
- `python title="train.py"` is a file, and a command of the page must start it.
- `bash` is commands. Those that start a file of the page run, with all their processes. The others
  need more time or other machines: `oktopk` is parsed by its own parser and so is torchrun, and
  files, make targets and extras must exist. A command that nobody knows is an error.
- `text` is no code. After a block that ran it is what that printed, but for the numbers.
- `diff` becomes Python.
- No language: commands if it begins with one, else no code.
- Anything else is an error, and so is a block that is not fenced. None is passed over.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import commands
import pages

ROOT = pages.ROOT
# two processes that import Lightning, or transformers, take as long as all other pages together
SLOW = {"docs/guides/lightning.md": "lightning", "docs/guides/huggingface.md": "transformers"}
NEEDS = {"docs/guides/accelerate.md": "accelerate", **SLOW}
NAMES = [str(page.relative_to(ROOT)) for page in pages.PAGES]
# what a page must print, beside what its blocks of output say
PRINTS = {"docs/guides/reducer.md": "less than dense"}


def test_requirements_name_tests_that_exist():
    text = (ROOT / "docs" / "requirements.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(n) for n in range(1, 45)]
    named = re.findall(r"(\w+/test_\w+\.py)::(test_\w+)", text)
    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), (file, test)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NAMES]
)
def test_blocks_run(name, tmp_path):
    if name in NEEDS and not find_spec(NEEDS[name]):
        pytest.skip(f"{name} needs {NEEDS[name]}")
    reading = pages.Reading(ROOT / name, tmp_path)
    reading.read()
    assert PRINTS.get(name, "") in reading.printed


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_the_text_exist(name):
    for words in pages.mentions(ROOT / name):
        commands.check_flags(words)


def test_troubleshooting_quotes_the_messages_of_the_source():
    headings = re.findall(r"^### .*", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    quoted = [text for heading in headings for text in re.findall(r"`([^`]+)`", heading)]
    messages = pages.messages(ROOT / "src")
    assert len(quoted) > 60
    gone = [text for text in quoted if not any(text.rstrip(". ") in each for each in messages)]
    assert not gone, "no message of src/ has this text any more"


WRONG = {
    "python fails": "```python\n1 / 0\n```\n",
    "a name of another page": "```python\nnumel\n```\n",
    "an output that is not printed": "```python\nprint('so')\n```\n\n```text\nnot so\n```\n",
    "a file nobody starts": '```python title="a.py"\npass\n```\n',
    "a file that fails": '```python title="a.py"\n1 / 0\n```\n\n```bash\npython a.py\n```\n',
    "no such flag": "```bash\noktopk train --epoch 3\n```\n",
    "no such command": "```\noktopk trian\n```\n",
    "no such config": "```bash\noktopk train --config lstm\n```\n",
    "no such flag of torchrun": "```bash\ntorchrun --nproc 2 --nodes 2 -m oktopk check\n```\n",
    "no such target": "```bash\nmake trian\n```\n",
    "no such extra": "```bash\npip install 'oktopk[trian]'\n```\n",
    "no such file": "```bash\npython benchmarks/none.py\n```\n",
    "a command nobody knows": "```bash\nls\n```\n",
    "a language nobody runs": "```ruby\nputs 1\n```\n",
    "not fenced": "so:\n\n    1 / 0\n",
    "indented": "- so:\n  ```python\n  1 / 0\n  ```\n",
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_page_is_noticed(why, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(WRONG[why])
    with pytest.raises((AssertionError, ArithmeticError, NameError)):
        pages.Reading(page, tmp_path).read()


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    if not find_spec("mkdocs"):
        pytest.skip("the site needs mkdocs")
    command = ("mkdocs", "build", "--strict", "--config-file", str(config))
    assert "-m mkdocs build --strict\n" in (ROOT / "Makefile").read_text()
    return subprocess.run(
        [sys.executable, "-m", *command, "--site-dir", str(folder)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr
    said = (built.stdout + built.stderr).splitlines()
    assert not [line for line in said if not line.startswith("INFO")]
    return folder


def test_dead_links_and_anchors_fail_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n[b](none.md) [c](#none) [d](../README.md)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md]\nplugins: []\n"
    )
    built = build(config, tmp_path / "site")
    assert built.returncode == 1
    assert built.stderr.count("WARNING") == 3, built.stderr


def test_the_site_needs_no_other_host(site):
    htmls = list(site.rglob("*.html"))
    assert len(htmls) > len(pages.PAGES) - 1  # all but the README, and a page for 404
    for html in htmls:
        loaded = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?([^\"' >]+)",
            html.read_text(),
        )
        assert any(name.endswith(".css") for name in loaded)
        assert not [name for name in loaded if re.match(r"(?:\w+:)?//", name)], html.name
    styles = [css.read_text() for css in site.rglob("*.css")]
    assert not [css for css in styles if re.search(r"url\([\"']?(?:https?:)?//|@import", css)]


def test_the_reference_has_all_that_is_public(site):
    import oktopk

    shown = (site / "reference.html").read_text()
    for name in oktopk.__all__:
        assert name == "__version__" or re.search(rf'id="oktopk\.(\w+\.)*{name}"', shown), name
