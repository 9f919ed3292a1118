"""One rule on one call: claims, probe, suspects, verdict."""
