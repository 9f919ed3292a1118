"""Our own rules on trial, and beside DTensor's."""
