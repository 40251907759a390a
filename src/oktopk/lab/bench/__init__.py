# SPDX-License-Identifier: Apache-2.0
"""`oktopk bench`: every method and the baselines of PyTorch, measured on networks of any speed."""
