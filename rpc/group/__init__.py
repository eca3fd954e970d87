"""Who is in the group, and the connections to them."""
