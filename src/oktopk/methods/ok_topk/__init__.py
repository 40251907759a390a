"""The Ok-Topk exchange (Li and Hoefler, PPoPP 2022)."""
