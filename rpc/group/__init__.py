"""The members of the group, and the connections to them."""
