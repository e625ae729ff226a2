"""Request and shop -> recommendation."""
