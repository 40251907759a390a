# SPDX-License-Identifier: Apache-2.0
"""Two hosts as Debian makes them: the name of each leads to 127.0.1.1. To be run by `unshare`.

The arguments are a folder and GLOO_SOCKET_IFNAME, which is not set if it is empty. Each host runs
one rank of `oktopk check`, with the variables of torchrun; what it says goes to the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from oktopk.launch import network

SIZE = 2


def start(rank: int, folder: Path, interface: str) -> subprocess.Popen[bytes]:
    hosts = folder / f"hosts-{rank}"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{rank}\n")
    command = f"hostname host{rank} && mount --bind {hosts} /etc/hosts && exec"
    command += f" {sys.executable} -m oktopk check --quick --timeout {20 if interface else 90}"
    variables = {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500}
    variables |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    with (folder / f"said-{rank}").open("wb") as said:
        return subprocess.Popen(
            [*network.prefix(rank), "unshare", "--uts", "sh", "-c", command],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | {name: str(value) for name, value in variables.items()},
        )


if __name__ == "__main__":
    network.build(SIZE)
    ranks = [start(rank, Path(sys.argv[1]), sys.argv[2]) for rank in range(SIZE)]
    sys.exit(max(process.wait(120) for process in ranks))
