"""Complete measurements of fxopt on real models; each module runs as ``python -m case_studies.<name>``."""
