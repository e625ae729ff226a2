"""Load on the running endpoint, side by side with other ways to serve."""
