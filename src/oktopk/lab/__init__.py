# SPDX-License-Identifier: Apache-2.0
"""What people run: the trainer and its tasks, and the tools that look at runs and compare them.

It stands on the library, which imports nothing from here.
"""
