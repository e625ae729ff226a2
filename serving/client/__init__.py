"""What the checkout's own code installs; it needs httpx alone."""
