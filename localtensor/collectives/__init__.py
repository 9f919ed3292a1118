"""What a collective is: reference arithmetic, argument checks, table of c10d ops, rendezvous."""
