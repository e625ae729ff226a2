"""Ranked lists that are kept for the next request."""
