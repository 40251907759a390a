# SPDX-License-Identifier: Apache-2.0
"""Collectives with byte counts, their transports, failure detection, and consistency checks."""
