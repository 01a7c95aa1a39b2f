"""Folders and the hub: all-or-nothing writes, journals, model cards. Knows no method."""
