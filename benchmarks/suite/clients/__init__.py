"""How a user of each system would publish, consume and ack from Python."""
