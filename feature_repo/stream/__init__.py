"""Events and facts from Kafka to the online store."""
