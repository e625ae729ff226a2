"""What the shop says now: facts, stock, rules."""
