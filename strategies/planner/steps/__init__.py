"""Legal steps of a redistribution, and what each costs."""
