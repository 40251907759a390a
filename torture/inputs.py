# SPDX-License-Identifier: Apache-2.0
"""Odd inputs of everything that reads something: a row for each reader.

A kind draws an input and returns what is to be called with it; `feeding` calls it within bounds.
"""

from __future__ import annotations

from torture import input_files, input_states, input_texts

KINDS = input_texts.KINDS | input_files.KINDS | input_states.KINDS
