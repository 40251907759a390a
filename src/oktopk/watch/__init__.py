# SPDX-License-Identifier: Apache-2.0
"""`oktopk watch`: a run in the terminal, while it is running."""
