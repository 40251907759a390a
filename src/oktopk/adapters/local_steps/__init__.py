# SPDX-License-Identifier: Apache-2.0
"""Local steps: ranks train alone and exchange weight changes every so many optimizer steps."""
