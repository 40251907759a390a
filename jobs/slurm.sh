#!/bin/bash
# Two nodes of four GPUs under SLURM: sbatch jobs/slurm.sh
# Edit: the partition, the time, the environment, and the options of oktopk train at the end.
#SBATCH --job-name=oktopk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
##SBATCH --partition=gpu
#SBATCH --output=oktopk-%j.log

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# Edit: where oktopk is installed, on a file system that all nodes see.
source "${VENV:-.venv}/bin/activate"

# Edit if the nodes have several networks (ip -brief address):
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# srun starts the eight ranks; each finds its place, and they meet on the first node at a port that
# follows from the job's number. On CPUs, leave --gpus-per-node out.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  python -m oktopk train --config lstm_extended --data data/an4 --resume
