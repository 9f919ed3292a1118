"""The command `localtensor` as `python -m localtensor`: it is that of `strategies`, which this package never imports.

`python -m` puts the current folder first on `sys.path`, where a user may have a folder called `strategies`.
"""

from importlib import import_module

from localtensor._util import lazy

if __name__ == "__main__":
    lazy.find_strategies()
    import_module("strategies.__main__").main()
