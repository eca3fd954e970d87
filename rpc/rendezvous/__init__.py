"""How workers find each other: a c10d store, and in it a static or a dynamic group."""
