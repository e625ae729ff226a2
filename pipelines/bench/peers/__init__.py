"""Published recommenders on the same test baskets: fitted, tuned on earlier weeks, and held beside ours."""
