"""The routes of the server, and what their bodies look like."""
