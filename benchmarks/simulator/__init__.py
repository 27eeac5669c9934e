"""Predicted costs of sharded Muon: the plan of `muonfx.sharding`, and the schemes of other libraries."""
