"""Programs over the shared caches, in every order."""
