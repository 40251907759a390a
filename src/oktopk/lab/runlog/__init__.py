# SPDX-License-Identifier: Apache-2.0
"""The run directory and its metrics: the schema, who writes it, who reads it, and sums over it.

schema          the records of `metrics.jsonl`, one type for each `kind`
writer          appends records
reader          reads a whole run directory
tail            reads what was appended since the last look
aggregates      steps, bytes and time by phase
histogram       magnitudes of a tensor in a few numbers
run_directory   names of the files, and making, finding and locking a directory
"""
