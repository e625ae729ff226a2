"""A fault on the whole system -> what it cost the callers."""
