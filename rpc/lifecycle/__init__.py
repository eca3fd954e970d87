"""``init_rpc``: backends, and the agent of our own one."""
