# SPDX-License-Identifier: Apache-2.0
"""Helpers that know nothing of the rest of the project."""
