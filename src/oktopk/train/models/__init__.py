"""The models of the trainer."""
