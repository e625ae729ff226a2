"""Ranker -> fewer units, fewer bits, the fastest form."""
