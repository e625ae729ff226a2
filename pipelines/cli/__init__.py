"""The `reco` command."""
