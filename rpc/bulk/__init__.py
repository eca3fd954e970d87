"""Ways for what is large: memory that two workers share, and several connections at once."""
