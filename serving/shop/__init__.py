"""What the shop says now: facts, stock, availability, rules."""
