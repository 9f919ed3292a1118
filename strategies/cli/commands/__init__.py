"""What each command does once its options are read; exit codes."""
