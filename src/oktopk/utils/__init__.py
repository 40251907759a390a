"""Small helpers without a place of their own: files, arguments, signals, time limits, devices."""
