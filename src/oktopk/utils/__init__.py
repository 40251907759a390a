"""Helpers that know nothing of the rest of the project."""
