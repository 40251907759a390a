# SPDX-License-Identifier: Apache-2.0
"""`oktopk compare`: the same training under several methods and densities."""
