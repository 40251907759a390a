# SPDX-License-Identifier: Apache-2.0
"""The Ok-Topk exchange (Li and Hoefler, PPoPP 2022)."""
