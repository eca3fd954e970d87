"""``init_rpc``: backends, and starting the agent of farcall's own backend."""
