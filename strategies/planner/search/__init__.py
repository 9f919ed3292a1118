"""The search over layouts, the cache of plans, alternatives."""
