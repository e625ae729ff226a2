"""The user's row: online features, freshness, circuit breaker."""
