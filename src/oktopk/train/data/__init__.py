"""From recordings to batches.

labels     characters and their numbers
audio      one recording as samples; what is wrong with it
manifest   lists of utterances, `wav,txt`, relative and sorted by duration
an4        AN4 as CMU gives it
speak      an AN4-like corpus from a speech synthesiser: sentences, voice, sound
features   cached spectrograms
batches    who gets which utterances in which step
commands   `oktopk data ...`
"""
