"""The speech trainer: data, model, loop. Needs `pip install 'oktopk[train]'`."""
