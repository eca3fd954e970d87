"""The messages of ``proto/farcall/v1``, generated."""
