"""A fault on the whole system -> its cost for the callers."""
