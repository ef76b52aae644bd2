"""Complete pipelines as Python functions: stages with what is handed from one to the next."""
