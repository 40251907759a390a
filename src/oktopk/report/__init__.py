"""What happened in a run, to look at: `oktopk report`, and what others read from a run's folder."""
