"""`oktopk report`: one page about a run. Other commands use its figures, tables and pages."""
