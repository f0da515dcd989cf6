raise RuntimeError("broken while it is imported")
