"""What is global in Python and torch, and swapped at each switch of ranks.

slots                  the tables: switches of torch, and names in modules; a new one has a line there
special_slots          those that take more: environment, warnings; what is not swapped, and why
generators             random generators
patched_attributes     temporary patches of a rank: mock.patch, monkeypatch
swap                   the swap itself
shared_propagation     what DTensor propagates, shared by ranks; propagation_settings: what that depends on
"""
