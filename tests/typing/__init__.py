"""Programs of users, for type checkers: ``make lint`` checks them with mypy strict."""
