# SPDX-License-Identifier: Apache-2.0
"""How models hand over their gradients."""
