"""One measurement a module: the product on real data -> a result file and its table."""
