"""Collectives with byte counts, their transports, failure detection, and consistency checks."""
