# SPDX-License-Identifier: Apache-2.0
"""`oktopk report`: one page about a run. Other commands use its figures, tables and pages."""
