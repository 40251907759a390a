# SPDX-License-Identifier: Apache-2.0
"""The speech trainer: data, model, loop. Needs `pip install 'oktopk[train]'`."""
