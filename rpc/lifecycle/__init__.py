"""From ``init_rpc`` to ``shutdown``."""
