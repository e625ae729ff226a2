"""One request's turn: deadline, admission, fallbacks."""
