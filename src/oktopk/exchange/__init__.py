# SPDX-License-Identifier: Apache-2.0
"""One model's exchange: the plan of a step, the step, the residual, the buckets."""
