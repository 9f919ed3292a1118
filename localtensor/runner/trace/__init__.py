"""What is made of a recorded run: a trace, a page, a summary; tables of communication, waits and memory."""
