#!/bin/bash
# Two nodes of four GPUs under PBS: qsub jobs/pbs.sh
# Edit: the queue, the time, the environment, and the options of oktopk train at the end.
#PBS -N oktopk
#PBS -l select=2:ncpus=32:ngpus=4:mpiprocs=1
#PBS -l place=scatter
#PBS -l walltime=04:00:00
##PBS -q gpu
#PBS -j oe

set -euo pipefail
cd "$PBS_O_WORKDIR"

# Edit: where oktopk is installed, on a file system that all nodes see.
VENV=${VENV:-$PBS_O_WORKDIR/.venv}
GPUS_PER_NODE=4

NODES=$(sort -u "$PBS_NODEFILE" | wc -l)
HEAD=$(head -n 1 "$PBS_NODEFILE")
# A port that follows from the job's number: two jobs on a host do not meet.
PORT=$((20000 + 10#${PBS_JOBID//[!0-9]/} % 12000))

# pbsdsh starts one torchrun per node, in an empty environment: all it needs is in its line. torchrun
# starts the ranks, and they find each other through the first node. (With an MPI, `mpiexec -n 8 -x
# MASTER_ADDR=$HEAD python -m oktopk train ...` does as well.)
# Edit if the nodes have several networks: put export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
# before the exec.
pbsdsh -- bash -c "cd '$PBS_O_WORKDIR' && source '$VENV/bin/activate' && exec torchrun \
  --nnodes $NODES --nproc-per-node $GPUS_PER_NODE --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint '$HEAD:$PORT' --rdzv-id '$PBS_JOBID' \
  -m oktopk train --config lstm_extended --data data/an4 --resume"
