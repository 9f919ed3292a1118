"""Plans carried out: in lockstep and over process groups."""
