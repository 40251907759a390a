# SPDX-License-Identifier: Apache-2.0
"""The job scripts: they parse, and the options they give to oktopk exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import environment
from oktopk.cli import parser
from oktopk.launch.ranks import RankEnvironment

JOBS = Path(__file__).parents[2] / "jobs"
SCRIPTS = sorted(JOBS.glob("*.sh"))
TRAINS = [*SCRIPTS, JOBS / "kubernetes.yaml"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", TRAINS, ids=lambda path: path.name)
def test_the_options_of_oktopk_exist(script):
    commands = re.findall(r"-m oktopk (train [^\"\n]*)", script.read_text())
    given = [command.split() for command in commands if "..." not in command]
    assert given, f"{script.name} does not run oktopk train"
    if "train" not in parser([]).format_help():
        pytest.skip("this version has no oktopk train yet")
    for words in given:
        parser(words).parse_args(words)  # exits with what is wrong


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def run_job(script: Path, folder: Path, **variables: object) -> str:
    """What the job's oktopk processes said, with stand-ins for the commands of the cluster."""
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").write_text(f"PATH={folder}:$PATH\n")
    env = environment(PATH=f"{folder}:{os.environ['PATH']}", VENV=str(folder / "venv"))
    env |= {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        ["bash", script], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_slurm_job_starts_ranks_that_find_their_rank_and_endpoint(tmp_path):
    """srun's stand-in gives the second rank of the second node its variables, as SLURM does."""
    fake(
        tmp_path,
        "srun",
        "while [[ $1 == --* ]]; do shift; done\n"
        "export SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=8 \\\n"
        "  SLURM_STEP_TASKS_PER_NODE='4(x2)' SLURM_STEP_NODELIST='gpu[07-08]' SLURM_STEP_ID=0\n"
        'exec "$@"',
    )
    code = (
        "from oktopk.launch.ranks import master_endpoint; "
        "from oktopk.launch.ranks import read_rank_environment; "
        "env = read_rank_environment(); print(env, master_endpoint(env)[0])"
    )
    fake(
        tmp_path,
        "python",
        f'echo "$@"; exec {sys.executable} -c "{code}"',
    )
    batch = {"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_CPUS_PER_TASK": 8}
    said = run_job(JOBS / "slurm.sh", tmp_path, SLURM_SUBMIT_DIR=tmp_path, **batch)
    env = RankEnvironment("srun", 5, 8, 1, 4)
    command = "-m oktopk train --config lstm_extended --data data/an4 --resume"
    assert said == f"{command}\n{env} gpu07\n"


def test_the_pbs_job_starts_torchrun_on_two_nodes_of_four(tmp_path):
    """pbsdsh's stand-in runs its command in an empty environment, as PBS does."""
    fake(tmp_path, "pbsdsh", 'shift; exec env -i PATH=/usr/bin:/bin "$@"')
    fake(tmp_path, "torchrun", 'echo "$PWD" "$@"')
    (tmp_path / "nodes").write_text("gpu1\ngpu2\n")
    job = {"PBS_O_WORKDIR": tmp_path, "PBS_NODEFILE": tmp_path / "nodes", "PBS_JOBID": "0812.head"}
    assert run_job(JOBS / "pbs.sh", tmp_path, **job) == (
        f"{tmp_path} --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d "
        "--rdzv-endpoint gpu1:20812 --rdzv-id 0812.head -m oktopk train --config lstm_extended "
        "--data data/an4 --resume\n"
    )


def test_the_kubernetes_job_hangs_together():
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    (worker,) = pod["containers"]
    values = {variable["name"]: variable["value"] for variable in worker["env"]}
    assert int(values["NODES"]) == spec["completions"]
    assert values["GPUS_PER_POD"] == worker["resources"]["limits"]["nvidia.com/gpu"]
    (line,) = worker["args"]
    assert f"--rdzv-endpoint {name}-0.{pod['subdomain']}:29400" in line and "\n" not in line
    done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {m["name"] for m in worker["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
