"""Programs: validation with follow-up steps and on several mesh axes."""
