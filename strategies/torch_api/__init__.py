"""The only package that touches DTensor's private parts."""
