# SPDX-License-Identifier: Apache-2.0
"""Commands without the packages they need: one line that says what to install."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import runlogs
from launchers import environment
from oktopk.utils.extras import EXTRAS

NEEDS = {
    ("methods",): (),
    ("report", "runs/a"): ("plotly",),
    ("watch", "a", "--once"): ("rich",),
    ("train",): ("soundfile", "jiwer", "tensorboard", "rich", "plotly", "espeakng_loader"),
    ("compare",): ("soundfile", "jiwer", "tensorboard", "rich", "plotly"),
    ("sweep",): ("soundfile", "jiwer", "tensorboard", "rich", "plotly", "optuna", "sklearn"),
    ("bench", "--plot", "a.png"): ("matplotlib",),
    ("completion", "bash"): ("shtab",),
    ("data", "an4", "nowhere"): ("soundfile",),
    ("data", "speak", "--train", "1", "--test", "1"): ("soundfile", "espeakng_loader"),
    ("data", "check", "nowhere"): ("soundfile",),
    ("data", "fix-manifest", "nowhere", "--root", "."): ("soundfile",),
}
PAIRS = [(command, package) for command, packages in NEEDS.items() for package in packages]


@pytest.mark.parametrize(("command", "package"), PAIRS)
def test_a_missing_package_is_told_in_one_line(
    oktopk, tmp_path, monkeypatch, capsys, command, package
):
    """And nothing is left behind."""
    runlogs.write(tmp_path / "runs" / "a", runlogs.whole_run())
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setitem(sys.modules, package, None)
    assert oktopk(*command) == 2
    said = capsys.readouterr()
    line = f"oktopk {command[0]}.* needs {package}, which is not installed: "
    assert re.match(rf"{line}pip install 'oktopk\[{EXTRAS[package]}\]'\n$", said.err), said.err
    assert said.out == "" and sorted(tmp_path.rglob("*")) == before


ALL_HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HIDDEN = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Hidden())
from oktopk import cli

for command in sys.argv[2:]:
    sys.argv = ["oktopk", *command.split()]
    try:
        cli.main()
    except SystemExit as left:
        code = left.code
    print(f"{command}: {code}", file=sys.stderr)
"""


def test_after_a_plain_install_all_commands_answer(tmp_path):
    """With every package of the extras hidden from the import system."""
    runlogs.write(tmp_path / "runs" / "a", runlogs.whole_run())
    works = ["--help", "--version", "train --help", "methods", "check --workers 1 --quick"]
    fails = [" ".join(command) for command, packages in NEEDS.items() if packages]
    done = subprocess.run(
        [sys.executable, "-c", ALL_HIDDEN, ",".join([*EXTRAS, "triton"]), *works, *fails],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        cwd=tmp_path,
        check=False,
    )
    assert "Traceback" not in done.stderr and "all is well" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line != "loading PyTorch"]
    assert lines[: len(works)] == [f"{command}: 0" for command in works]
    told = lines[len(works) :]
    assert told[1::2] == [f"{command}: 2" for command in fails]
    assert all("pip install 'oktopk[" in line for line in told[::2])
