def attach(d): pass
def is_cached(d, s): return False
