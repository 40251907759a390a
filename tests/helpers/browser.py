# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen: what a page made of itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=30000",  # enough for timers; it does not wait for real
]
# asks the page how many requests it made, when it has drawn everything
ASK = """<script>
const asked = setInterval(() => {
  if (document.body.dataset.drawn === undefined) return;
  clearInterval(asked);
  document.body.dataset.requests = performance.getEntriesByType("resource").length;
}, 20);
</script></body>"""


@dataclass(frozen=True)
class Seen:
    """A page after its scripts ran."""

    dom: str
    console: list[str]

    def number(self, name: str) -> int:
        found = re.search(rf'data-{name}="(\d+)"', self.dom)
        assert found, f"the page never said {name}; console: {self.console}"
        return int(found[1])

    @property
    def drawn(self) -> int:
        """Figures that have axes with something on them."""
        return len(re.findall(r'<g class="cartesianlayer">\s*<g class="subplot xy">', self.dom))


def figures(path: Path) -> int:
    """How many a page has to draw."""
    return len(re.findall("<div class=plot ", path.read_text()))


def look(path: Path, scratch: Path) -> Seen:
    """Open a page from disk."""
    assert BROWSER is not None
    asking = scratch / "asking.html"
    asking.write_text(path.read_text().replace("</body>", ASK, 1))
    profile = f"--user-data-dir={scratch / 'profile'}"
    command = [BROWSER, *FLAGS, profile, "--dump-dom", asking.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(done.stdout, console)
