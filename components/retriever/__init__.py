"""Examples -> two-tower retriever and its index."""
