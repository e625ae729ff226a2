"""Retrieval, ranking and re-ranking: pure functions of arrays."""
