# SPDX-License-Identifier: Apache-2.0
"""What an optimizer needs when gradients arrive late: presets, correction, residual scaling."""
