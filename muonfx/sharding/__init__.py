"""One chain under every shard layout, with the same answer."""
