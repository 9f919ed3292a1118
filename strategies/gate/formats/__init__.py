"""What CI reads: terminal, JSON, JUnit, SARIF, Markdown, annotations."""
