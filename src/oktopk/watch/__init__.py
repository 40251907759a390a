"""`oktopk watch`: a run in the terminal, as it goes on."""
