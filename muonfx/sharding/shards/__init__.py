"""Which rank holds which shard of a tensor: values, which need no process group."""
