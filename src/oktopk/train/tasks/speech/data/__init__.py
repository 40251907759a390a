# SPDX-License-Identifier: Apache-2.0
"""From recordings to batches.

labels     characters and their numbers
audio      one recording as samples, and checks of it
manifest   lists of utterances, `wav,txt`, with relative paths, sorted by duration
repair     manifests with the paths of another machine
an4        AN4 as CMU distributes it
sentences  what the speakers of a synthetic corpus say
synthesis  an AN4-like corpus from a speech synthesizer
espeak     the program that synthesis runs in a process of its own
features   cached spectrograms
batches    which rank gets which utterances in which step
commands   `oktopk data ...`
"""
