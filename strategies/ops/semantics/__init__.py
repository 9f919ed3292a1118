"""The meaning of a rule: rule queries, placement rules, local calls and checks."""
