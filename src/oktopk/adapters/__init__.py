"""How models hand over their gradients."""
