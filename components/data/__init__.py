"""Events -> features and training examples."""
