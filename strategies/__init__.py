"""Judges claims about sharding: takes rules from torch or from you, and puts each on trial.

The command line is `localtensor validate`.  May import `localtensor`, never the other way round.
"""
