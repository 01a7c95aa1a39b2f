"""Reports: tables and figures of a store's results."""
