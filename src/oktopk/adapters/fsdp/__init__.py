# SPDX-License-Identifier: Apache-2.0
"""FSDP2: sharded inside a site, sparse between sites."""
