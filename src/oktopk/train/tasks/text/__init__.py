# SPDX-License-Identifier: Apache-2.0
"""Language modelling: a GPT predicts the next character of a text.

options   the settings of the task
corpus    the characters to train on and to validate with
gpt       the model
task      `Text`: crops of the text, cross entropy, continued prompts
"""
