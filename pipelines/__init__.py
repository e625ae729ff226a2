"""The graphs people launch, and the `reco` command."""
