"""Examples -> bundle: one module per pipeline step."""
