"""The data plane: rows, streams and the ledger in Redis or Valkey.

`connection` reaches a server, `embedded` runs one, `rows` keeps trajectories, `ledger` is the controller's side of the
protocol and `prompts` the rollouts'. The protocol itself is in `scripts/`; its key schema stands at the top of
`scripts/common.lua`.
"""
