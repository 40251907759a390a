"""`oktopk watch`: a run in the terminal, while it is running."""
