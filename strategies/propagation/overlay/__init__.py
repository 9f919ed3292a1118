"""Our rules inside the running DTensor."""
