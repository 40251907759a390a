"""`oktopk bench`: a cluster in a box. Every method and its peers on one network, in one run."""
