"""Other libraries' schemes of sharded Muon on paper, beside the plan of `muonfx.sharding`."""
