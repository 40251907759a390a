# SPDX-License-Identifier: Apache-2.0
"""What is given to users: the archives, their metadata, and the license of every file."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from commands import ROOT
from oktopk.utils.extras import EXTRAS
from oktopk.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("src", "tests", "benchmarks", "examples", "torture")
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_every_source_file_names_its_license():
    without = [str(path.relative_to(ROOT)) for path in sources() if SPDX not in path.read_text()]
    assert not without, f"add {SPDX.strip()!r} as the first line of {without}"
    assert len(sources()) > 300


def test_no_link_leads_out_of_the_package():
    assert [path for path in (ROOT / "src").rglob("*") if path.is_symlink()] == []


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_nothing_is_left_to_fill_in():
    for name in ("LICENSE", "NOTICE", "CITATION.cff"):
        text = (ROOT / name).read_text()
        assert "[yyyy]" not in text and "oktopk" in text, name


def test_every_package_of_an_extra_is_in_that_extra():
    """So that the line `pip install 'oktopk[...]'` of an error helps."""
    names = {"espeakng_loader": "espeakng-loader", "PIL": "pillow", "sklearn": "scikit-learn"}
    names["ignite"] = "pytorch-ignite"
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        wanted = [re.split(r"[<>=;\[ ]", one)[0] for one in extras[extra]]
        assert names.get(package, package) in wanted, (package, extra)
    assert "oktopk[view]" in extras["train"] and "oktopk[train]" in extras["sweep"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The source archive and the wheel, made from a copy by the build backend itself."""
    out = tmp_path_factory.mktemp("dist")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if files.returncode:
        pytest.skip("not a git checkout")
    copy = out / "copy"
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    code = (
        "import sys; from setuptools import build_meta; out = sys.argv[1];"
        "build_meta.build_sdist(out), build_meta.build_wheel(out)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def test_the_wheel_has_the_package_and_its_data(archives):
    names = set(zipfile.ZipFile(archives[1]).namelist())
    for path in (ROOT / "src" / "oktopk").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT / "src")) in names, path
    assert {name.split("/")[0] for name in names} == {"oktopk", f"oktopk-{__version__}.dist-info"}
    assert any(name.endswith("licenses/NOTICE") for name in names)


def test_the_wheel_declares_what_it_runs_on(archives):
    wheel = zipfile.ZipFile(archives[1])
    text = wheel.read(f"oktopk-{__version__}.dist-info/METADATA").decode()
    for line in ("Requires-Python: >=3.11", "License-Expression: Apache-2.0"):
        assert f"\n{line}\n" in text
    for minor in (11, 12, 13):
        assert f"\nClassifier: Programming Language :: Python :: 3.{minor}\n" in text


def test_the_source_archive_has_what_its_tests_read(archives):
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in (*FOLDERS, "docs", "jobs", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and not {"__pycache__", "oktopk.egg-info"} & set(parts):
                assert "/".join(parts) in names, path
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "CITATION.cff", "NOTICE"} <= names
