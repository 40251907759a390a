# SPDX-License-Identifier: Apache-2.0
"""Attack the library from outside: real processes and odd inputs, bounded in time, with a seed.

python -m torture --seed 1 --faults 300 --inputs 10000 --minutes 60
"""
