# SPDX-License-Identifier: Apache-2.0
"""Speech recognition: lstman4 on AN4, or on a corpus from a speech synthesizer.

options   the settings of the task
task      `Speech`: data, loss, word and character error rates
lstman4   the model
decode    from log probabilities to text
data      from recordings to batches, and `oktopk data ...`
"""
