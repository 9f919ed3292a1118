"""What one rank may change in Python without another seeing it: its modules, their globals and classes, its folder and umask.

Settings of torch and of the process that have a getter and a setter are in `threads/state`.
"""
