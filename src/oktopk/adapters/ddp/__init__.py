# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: attach, the handle, the communication thread."""
