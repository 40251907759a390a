"""What an optimizer needs when gradients arrive late: presets, correction, residual scaling."""
