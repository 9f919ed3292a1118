"""The command `localtensor` as `python -m localtensor`: it is that of `strategies`, which this package never imports."""

from importlib import import_module

if __name__ == "__main__":
    import_module("strategies.__main__").main()
