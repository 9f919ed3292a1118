"""Which calls to try: captured from OpInfo, drawn from the schema, selected."""
