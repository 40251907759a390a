"""Starting ranks: the environment of a rank, rendezvous, process group, local workers."""
