"""The messages of the open inference protocol, generated from ``proto/farcall/kserve``."""
