"""Generated rank programs and their reference."""
