"""Pipeline runs: on this machine or on a cluster."""
