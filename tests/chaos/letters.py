"""The dead letters of a broker, read as an operator's consumer would."""

import json
from typing import Any

from feature_repo.stream.kafka import KafkaSettings, client_config


def dead_letters(settings: KafkaSettings) -> list[tuple[str, dict[str, Any]]]:
    """Return the key and the content of each letter."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({**client_config(settings), "group.id": "test"})
    topic = settings.dead_letter_topic
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    letters = []
    while (message := consumer.poll(5)) is not None:  # the broker's own count of them is too low
        letters.append(((message.key() or b"").decode(), json.loads(message.value() or b"")))
    consumer.close()
    return letters
