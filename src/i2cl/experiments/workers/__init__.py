"""Work spread over processes of this machine, or over a Ray cluster; `predict` uses it too."""
