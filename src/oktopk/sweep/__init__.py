"""`oktopk sweep`: search settings of a training run. Needs `pip install 'oktopk[train,sweep]'`."""
