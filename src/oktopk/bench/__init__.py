"""`oktopk bench`: every method and the baselines of PyTorch, measured on networks of any speed."""
