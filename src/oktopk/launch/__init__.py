# SPDX-License-Identifier: Apache-2.0
"""Starting ranks: the environment of a rank, rendezvous, process group, local workers."""
