def feed(a,b,c):
    return []
