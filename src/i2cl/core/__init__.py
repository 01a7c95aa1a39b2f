"""The paper's method, one file a subsection of its section "Methodology"."""
