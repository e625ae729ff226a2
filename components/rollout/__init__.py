"""A version -> the traffic: a canary on two slots of a cluster that aborts by itself."""

NAMESPACE = "checkout"  # of route, slots and Jobs
