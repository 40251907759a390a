"""FSDP2: sharded inside a site, sparse between sites."""
