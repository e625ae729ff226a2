"""A shopper who must be forgotten -> files and stores without them."""
