"""One model that answers for many tasks over HTTP: `i2cl serve`."""
