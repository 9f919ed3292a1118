"""What one rank may change without another seeing it: its modules, their globals and classes, settings of the process."""
