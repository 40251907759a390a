"""`oktopk compare`: the same training under several methods and densities."""
