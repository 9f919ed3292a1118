"""Everything public of DTensor in small programs, each beside its plain twin on one device."""
