"""The shopper's row: online features, layout, freshness, breaker."""
