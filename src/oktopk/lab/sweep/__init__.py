# SPDX-License-Identifier: Apache-2.0
"""`oktopk sweep`: search settings of a training run. Needs `pip install 'oktopk[train,sweep]'`."""
