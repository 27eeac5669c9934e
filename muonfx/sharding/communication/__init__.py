"""Everything in `muonfx.sharding` that communicates: exchanges of tensors, collectives, and agreement of the ranks."""
