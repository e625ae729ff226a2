"""Ranked lists that are cached for the next request."""
