"""Event -> feature: the event contract, the features, the feature store."""
